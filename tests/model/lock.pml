/* The lock protocol of django_redis_lock/locking as a model for spin: three clients, one lock, one
 * server, and every state they can get into. `make model` checks it.
 *
 * A client is a process with its keeper that wants the lock again and again. Each script is one
 * indivisible step, and so is what a client does when it hears an answer. Sending a call and
 * carrying it out are one step as well, except where others could notice the time between: when the
 * call is sent again, arrives late, or is overtaken on another connection.
 *
 * It is checked in three ways.
 *
 * At any pace (no macro): safety. Nothing is bounded, neither acquisitions nor lost answers, broken
 *     connections, kills. Time passes whenever it likes, so every client may stop anywhere for as
 *     long as it likes; who is frozen, cut off or slow needs no rule of its own. Whether a release
 *     finds a live waiter on the register is left open: entries may have lapsed, and there may
 *     be dead ones. A keeper may look at any time, also when its client has just left.
 * CHOSEN (with or without PROMPT): the caller chooses the token (`token=`, `id=`). Token and
 *     attempt together are what a token is to the others. Every grant is asked about, and then the
 *     lock gets the chosen token.
 * PROMPT: how long anybody waits. Time passes only when nobody who is well has anything left to
 *     do. What goes wrong is counted: in a run at most FAULTS times, and each client acquires at
 *     most ROUNDS times. Here are the register, the keepers' timetables, freezing and thawing, the
 *     lock deleted by hand or reset, companion keys that vanish, and connections that died without
 *     a word on either side. Redis out of memory refuses no script but ACQUIRE, and that as a
 *     whole: to its caller, one more answer that is an error.
 *
 * Time is counted in ticks: each takes one off all that is left of lifetimes. With PROMPT a tick is
 * about a second, and what takes less (the second look of a keeper that has seen a grant lying
 * about, 0.2 s later) takes none. A client's deadline is reckoned from the moment at which the
 * server sets the lifetime, the latest that the code can arrive at: it reckons from before it
 * sends. The age of a grant is known exactly; the code's estimate is never below it, and any grant,
 * however fresh, may be asked about.
 *
 * Properties, all of them assertions:
 *   S1, S5   who believes to hold the lock has his token in K, and for at least as long as he will
 *            believe it without another answer; so there is one of them at most (RIGHT)
 *   S2       only the token that is in K frees the lock (give_up, give_to_next)
 *   S3       all others, with answers lost, calls repeated and calls that arrive late
 *   S4       who comes to believe has a greater fence than all who did before (show_fence)
 *   L2       while somebody who is well waits, the lock is never without an owner for a tick if
 *            nothing went wrong, and never longer than GRANT_TIMEOUT for each fault; the time that
 *            a dead or frozen holder's lifetime has left is not counted (BOUND). So no grant is
 *            lost for good, and whoever waits and is well gets the lock at last
 *   leaving  nobody goes home with a grant that is still good (leave)
 *   and nobody is ever stuck: spin's invalid end states, where not even time may pass.
 *
 * Not in the model: threads and tasks behind each other in one process, min_hold, extend,
 * lifetimes without end, the index and the owner's details, polling, clocks that jump, a server
 * that restarts. An ACQUIRE or LEAVE that arrives so late that not even its client's Abandoned
 * job reckons with it is there at any pace, but not with PROMPT: a lock that it gets is nobody's
 * for its whole lifetime. So is one whose holder gives up releasing it.
 *
 * States that differ in names only count as one (`done`): tokens are numbered in the order in which
 * they stand, and used again when nobody knows them any more; fences keep their order and not
 * their distance; the clients, all alike, are sorted (unless TELL_CLIENTS_APART, for traces).
 *
 *   at any pace                            432,000 states     0.2 GB     10 s
 *   CHOSEN                                 456,000 states     0.2 GB     10 s
 *   PROMPT, 2 faults, 2 rounds           7,013,000 states     1.6 GB     60 s
 *   PROMPT, 3 faults, 1 round            1,426,000 states     0.4 GB     15 s
 *   PROMPT CHOSEN, 1 fault, 2 rounds       694,000 states     0.3 GB     10 s
 *
 * Each of the other macros is a mistake that somebody could make; checker.py says which, and sees
 * to it that each is found out.
 */

#ifdef PROMPT
#define LIFETIME      6     /* of a lock */
#define GRANT_TIMEOUT 2     /* of a grant */
#define FRESH         1     /* a grant that is younger is believed without an answer */
#define LOOK_EVERY    2     /* of a keeper whose client waits */
#ifdef LOOK_LATE
#define NEXT_LOOK     K_left
#else
#define NEXT_LOOK     (K_left < LOOK_EVERY -> K_left : LOOK_EVERY)
#endif
#define LINE          5     /* places in Redis's queue for the blocking pop */
#ifndef FAULTS
#define FAULTS        2
#endif
#ifndef ROUNDS
#define ROUNDS        2
#endif
#define BOUND         (GRANT_TIMEOUT * (FAULTS - faults))
#else
#ifndef LIFETIME
#define LIFETIME      4
#endif
#ifndef GRANT_TIMEOUT
#define GRANT_TIMEOUT 3
#endif
#ifndef FRESH
#define FRESH         2
#endif
#define LINE          3
#endif

/* -- What Redis knows. 0 is no token, no fence, nobody ----------------------------------------- */

byte K, K_left;                             /* the lock: a token and its lifetime */
byte grants, grants_left, grants_fence;     /* the only element of the list of grants */
byte line[LINE];                            /* clients (1 to 3) whose pop blocks, in their order */
#define DEAD_CONNECTION 4

/* -- What clients know ------------------------------------------------------------------------- */

mtype = {
    IDLE,
    ASKING,     /* ACQUIRE is under way, perhaps again */
    ACQUIRED,   /* ACQUIRE got the lock, its answer is under way */
    WAITING,    /* registered */
    TAKING,     /* TAKE_GRANT found the grant valid, its answer is under way */
    HOLDING,    /* the body runs; it counts as held while `left` lasts */
    RELEASING,  /* RELEASE is under way, perhaps again */
    LEFT,       /* LEAVE did not get the lock; what did the pop bring? */
    WON,        /* LEAVE got it */
    CANCELLED,  /* LEAVE did not try */
    DEAD
};
mtype = {
    OUT,        /* Redis does not know of the blocking pop (yet, or any more) */
    IN,         /* it blocks */
    GRANTED,    /* it was answered with a grant */
    FAREWELL,   /* it was answered with the farewell */
    SILENT      /* its connection is dead, and the client does not know */
};
mtype = { UNTOLD, KEPT, LOST };

typedef Client {
    mtype at = IDLE;
    mtype pop = OUT;
    byte own;                                   /* the request's token; then, what it holds */
    byte left;                                  /* ticks until its deadline */
    byte fence;                                 /* of an acquisition that it does not know of yet */
    byte grant, grant_left, grant_fence;        /* what the pop was answered with */
#ifdef PROMPT
    bool frozen;
    bool registered;
    byte look;                                  /* ticks until its keeper looks */
    bool lying;                                 /* the keeper has seen a grant lying about */
    byte round
#else
    mtype told = UNTOLD;                        /* answer to a renewal, or to a believed grant's */
    byte told_left                              /* TAKE_GRANT, which is the same to all others */
#endif
};
Client client[3];
#define my client[_pid]
#define me (_pid + 1)

byte late;      /* the token of an ACQUIRE or LEAVE that will arrive when nobody reckons with it */
byte job;       /* the token that an Abandoned job releases */
#ifdef PROMPT
byte job_of;    /* whose keeper has the job */
byte doomed;    /* the token that an operator's reset has named, and is to end */
byte faults = FAULTS;
byte ownerless; /* ticks for which somebody well has waited and nobody has owned the lock */
#endif

/* Only of use within a step; 0 between steps. */
byte token, n, i, j;
byte number[11];

/* -- Properties -------------------------------------------------------------------------------- */

#define BELIEVES(c) (c.at == HOLDING && c.left > 0)
#define RIGHT(c)    (!BELIEVES(c) || (K == c.own && K_left >= c.left))

#ifdef PROMPT
#ifdef AWAIT_SILENCE
#define STARES(c)   (c.at == WON && c.pop == SILENT && c.left > 0)
#else
#define STARES(c)   false
#endif
/* Whose token K is. Who waits or leaves does not know that it is his; who was granted the lock
 * when he did not want it any more, and passes it on, has had it for a moment. */
#define OWNS(c)     ((K == c.own && c.at != WAITING && c.at != LEFT && c.at != CANCELLED && \
                      !STARES(c)) || \
                     (K == c.grant && c.at == CANCELLED && !c.frozen))
#define OWNED       (K != 0 && (OWNS(client[0]) || OWNS(client[1]) || OWNS(client[2]) || K == job))
#define WAITS(c)    (c.at == WAITING && !c.frozen)
#define UNSERVED    (!OWNED && (WAITS(client[0]) || WAITS(client[1]) || WAITS(client[2])))
#endif

/* -- Pace and faults --------------------------------------------------------------------------- */

#ifdef PROMPT
#define AT_ANY_PACE     false
#define RUNS            (!my.frozen)
#define FAULT           (faults > 0)
#define WAITED_FOR      (client[0].registered || client[1].registered || client[2].registered)
#define NOT_WAITED_FOR  (!WAITED_FOR)
inline fault() { faults-- }
inline put_on_register() { my.registered = true }
inline take_off_register() { my.registered = false }
inline stop_watching() { my.look = 0; my.lying = false }
inline stop_renewing() { skip }
#else
#define AT_ANY_PACE     true
#define RUNS            true
#define FAULT           true
#define WAITED_FOR      true
#define NOT_WAITED_FOR  true
inline fault() { skip }
inline put_on_register() { skip }
inline take_off_register() { skip }
inline stop_watching() { skip }
inline stop_renewing() { my.told = UNTOLD; my.told_left = 0 }
#endif

/* -- The end of every step --------------------------------------------------------------------- */

#ifdef PROMPT
#define PLACE(c) ((((((((c.at * 8 + c.pop) * 8 + c.left) * 4 + c.grant_left) * 4 + c.look) * 4 \
                  + c.round) * 2 + c.frozen) * 2 + c.registered) * 2 + c.lying)
#else
#define PLACE(c) ((((c.at * 8 + c.pop) * 8 + c.left) * 8 + c.grant_left) * 8 + c.told_left)
#endif

#ifndef TELL_CLIENTS_APART
/* In C, so that gcc need not compile it again for every step; spin's simulations do without. */
c_code {
    static void sort(int a, int b) {
        struct Client client = now.client[a];
        int n;
        if (PLACE(now.client[a]) <= PLACE(now.client[b])) return;
        now.client[a] = now.client[b];
        now.client[b] = client;
#ifdef PROMPT
        now.job_of = now.job_of == a + 1 ? b + 1 : now.job_of == b + 1 ? a + 1 : now.job_of;
#endif
        for (n = 0; n < LINE; n++)
            now.line[n] = now.line[n] == a + 1 ? b + 1 : now.line[n] == b + 1 ? a + 1 : now.line[n];
    }
}
#endif

inline rename(x) {
    if
    :: x != 0 -> if :: number[x] == 0 -> n++; number[x] = n :: else fi; x = number[x]
    :: else
    fi
}
inline is_rank(x) { if :: x == i -> n = 1 :: else fi }
inline close_gap(x) { if :: x > i -> x-- :: else fi }

#ifdef PROMPT
inline forget_what_is_over(c) { if :: c.at == DEAD && c.own != K -> c.own = 0 :: else fi }
#endif

/* For spin's simulations; the checker does without. */
#ifdef PROMPT
#define STATE(c) c.at, c.pop, c.own, c.left, c.grant, c.frozen, c.registered, c.look
inline say(c) {
    printf("      %e %e own=%d left=%d grant=%d frozen=%d registered=%d look=%d\n", STATE(c))
}
#else
#define STATE(c) c.at, c.pop, c.own, c.left, c.grant, c.grant_left, c.told
inline say(c) { printf("      %e %e own=%d left=%d grant=%d grant_left=%d %e\n", STATE(c)) }
#endif
inline say_how_it_is() {
    printf("By %d: K=%d K_left=%d grants=%d late=%d job=%d, in line %d %d %d\n",
        _pid + 1, K, K_left, grants, late, job, line[0], line[1], line[2]);
    say(client[0]); say(client[1]); say(client[2])
}

inline done() {
    assert(RIGHT(client[0]) && RIGHT(client[1]) && RIGHT(client[2]));   /* S1, S5 */
    if :: job != K && job != late -> job = 0 :: else fi;    /* That token will not come back. */
#ifdef PROMPT
    if :: job == 0 -> job_of = 0 :: else fi;
#ifndef RESET_ANY
    if :: doomed != K -> doomed = 0 :: else fi;     /* What that holder held is over. */
#endif
    forget_what_is_over(client[0]); forget_what_is_over(client[1]); forget_what_is_over(client[2]);
    if :: !UNSERVED -> ownerless = 0 :: else fi;
#endif
#ifdef TELL_CLIENTS_APART
    say_how_it_is();
#else
    c_code { sort(0, 1); sort(1, 2); sort(0, 1); };
#endif
    n = 0; j = 0;
    rename(K); rename(grants); rename(late); rename(job);
#ifdef PROMPT
    rename(doomed);
#endif
    do :: j < 3 -> rename(client[j].own); rename(client[j].grant); j++ :: else -> break od;
    i = 7;
    do
    :: i > 0 ->
        n = 0; j = 0;
        is_rank(grants_fence);
        do
        :: j < 3 -> is_rank(client[j].fence); is_rank(client[j].grant_fence); j++
        :: else -> break
        od;
        if
        :: n == 0 ->
            j = 0;
            close_gap(grants_fence);
            do
            :: j < 3 -> close_gap(client[j].fence); close_gap(client[j].grant_fence); j++
            :: else -> break
            od
        :: else
        fi;
        i--
    :: else -> break
    od;
    do :: i < 11 -> number[i] = 0; i++ :: else -> break od;
    i = 0; j = 0; n = 0; token = 0
}

/* -- Tokens and fences ------------------------------------------------------------------------- */

inline unlike(x) { if :: x == token -> n = 1 :: else fi }
inline new_token() {
    token = 0; n = 1;
    do
    :: n == 1 ->
        token++; n = 0; j = 0;
        unlike(K); unlike(grants); unlike(late); unlike(job);
#ifdef PROMPT
        unlike(doomed);
#endif
        do :: j < 3 -> unlike(client[j].own); unlike(client[j].grant); j++ :: else -> break od
    :: else -> break
    od
}

/* A fence is written as its rank among those that nobody has shown yet, from 1; 0 is one that is
 * not greater than the last one shown. */
inline exceed(x) { if :: x >= n -> n = x + 1 :: else fi }
inline next_fence() {
    n = 1; j = 0;
    exceed(grants_fence);
    do :: j < 3 -> exceed(client[j].fence); exceed(client[j].grant_fence); j++ :: else -> break od
}
inline rank_after(x) { x = (x > n -> x - n : 0) }
inline show_fence() {
    assert(my.fence > 0);   /* S4 */
    n = my.fence; j = 0;
    rank_after(grants_fence);
    do
    :: j < 3 -> rank_after(client[j].fence); rank_after(client[j].grant_fence); j++
    :: else -> break
    od
}

/* -- The queue, and what the scripts share ----------------------------------------------------- */

inline place_of(who) { i = 0; do :: i < LINE && line[i] != who -> i++ :: else -> break od }
inline join_line() { place_of(0); line[i] = me; my.pop = IN }
inline leave_line(who) {
    place_of(who);
    do
    :: i < LINE - 1 -> line[i] = line[i + 1]; i++
    :: i == LINE - 1 -> line[i] = 0; i++
    :: i == LINE -> break
    od
}
inline empty_list() { grants = 0; grants_left = 0; grants_fence = 0 }
inline pop_grant(c) {
    c.pop = GRANTED;
    c.grant = grants; c.grant_left = grants_left; c.grant_fence = grants_fence;
    empty_list()
}
inline set_lock(t, lifetime) {
    K = t; K_left = lifetime;
#ifndef KEEP_LIST
    empty_list()
#endif
}
inline pass_on() {  /* `grant` in scripts.py, and Redis serving the pop that has blocked longest */
    new_token();
    next_fence();
#ifdef GRANT_OLD_FENCE
    n--;
#endif
    set_lock(token, GRANT_TIMEOUT);
    grants = token; grants_left = GRANT_TIMEOUT; grants_fence = n;
    n = line[0];
    if
    :: n == DEAD_CONNECTION -> leave_line(n); empty_list()
    :: n > 0 && n != DEAD_CONNECTION -> leave_line(n); pop_grant(client[n - 1])
    :: n == 0
    fi
}
inline give_up(t) {     /* RELEASE with no live waiter */
    assert(K == t);     /* S2 */
    K = 0; K_left = 0;
    empty_list()
}
inline give_to_next(t) {
    assert(K == t);     /* S2 */
    pass_on()
}

/* The lock can be taken: free, mine already, or a grant that lies on the list. */
#if defined(FORGET_OWN)
#define FREE (K == 0 || K == grants)
#else
#define FREE (K == 0 || K == grants || K == my.own)
#endif
inline acquire() {
    next_fence();
    set_lock(my.own, LIFETIME);
    my.fence = n; my.left = LIFETIME
}

#ifdef RELEASE_ANY
#define HOLDS (K != 0)
#else
#define HOLDS (K == my.own)
#endif

/* -- What clients do --------------------------------------------------------------------------- */

inline hang_up() {
    leave_line(me);
    my.pop = OUT; my.grant = 0; my.grant_left = 0; my.grant_fence = 0
}
inline go_home() {
    hang_up();
    stop_watching();
    stop_renewing();
    my.own = 0; my.left = 0; my.fence = 0; my.at = IDLE
}
inline leave() {
    assert(my.grant == 0 || my.grant != K);
    go_home()
}
inline ask() { stop_watching(); my.left = 0; my.fence = 0; my.at = ASKING }
inline abandon(t) {
#ifdef NO_CLEANUP
    skip
#else
    if
    :: job == 0 ->
        job = t
#ifdef PROMPT
        ; job_of = me
#endif
    :: else     /* The process whose keeper had it is no more. */
    fi
#endif
}
inline wait() {
#ifndef REGISTER_APART
    put_on_register();
#endif
#ifdef PROMPT
    my.look = NEXT_LOOK;
#endif
    my.at = WAITING
}
inline believe() {
#ifdef DEADLINE_FROM_ANSWER
    my.left = LIFETIME;
#endif
    if :: my.left > 0 -> show_fence() :: else fi;
    my.fence = 0;
    hang_up();
    stop_watching();
    my.at = HOLDING
}
inline accept_grant() {
#ifndef CHOSEN
    my.own = my.grant;
#endif
    my.fence = my.grant_fence
}
inline say_farewell() {     /* LEAVE pushes to the list the same pop listens to */
    take_off_register();
    if :: my.pop == IN -> leave_line(me); my.pop = FAREWELL :: else fi
}

inline put_on_register_apart() {
#ifdef REGISTER_APART
    put_on_register()
#else
    skip
#endif
}
#ifdef PROMPT
inline die() {
    go_home();
    my.own = n; my.at = DEAD; my.frozen = false; my.round = ROUNDS
}
inline rob_of_grant(c) { c.grant = 0; c.grant_left = 0; c.grant_fence = 0 }
inline rob(c) { c.left = 0; c.registered = false; rob_of_grant(c) }
inline rob_if_its(c) {
    if :: c.own == K -> c.left = 0 :: else fi;
    if :: c.grant == K -> rob_of_grant(c) :: else fi
}
#endif

#define LEAVING     (my.at == LEFT || my.at == WON || my.at == CANCELLED)
#define HAS_GRANT   ((my.at == WAITING || my.at == LEFT) && my.pop == GRANTED)
#define VALID       (my.grant != 0 && K == my.grant)
#ifdef TAKE_ANY
#define ANY_WILL_DO true
#else
#define ANY_WILL_DO false
#endif
#ifdef BELIEVE_STALE
#define BELIEVABLE  true
#else
#define BELIEVABLE  (GRANT_TIMEOUT - my.grant_left < FRESH)
#endif
/* To freeze or kill it makes a difference. */
#define STIRS       (my.at != DEAD && (my.at != IDLE || job_of == me))

active [3] proctype clients() {
    do
    /* ACQUIRE. Its answer may be lost: then it is sent again, or its caller gets an error. */
#ifdef PROMPT
    :: d_step { my.at == IDLE && RUNS && my.round < ROUNDS -> my.round++; new_token();
                my.own = token; ask(); done() }
#else
    :: d_step { my.at == IDLE -> new_token(); my.own = token; ask(); done() }
#endif
    :: d_step { my.at == ASKING && RUNS && FREE -> acquire(); my.at = ACQUIRED; done() }
    :: d_step { my.at == ASKING && RUNS && !FREE -> wait(); done() }
    :: d_step { my.at == ACQUIRED && RUNS -> believe(); done() }
    :: d_step { my.at == ACQUIRED && FAULT -> fault(); ask(); done() }
    :: d_step { (my.at == ASKING || my.at == ACQUIRED) && FAULT -> fault();
                abandon(my.own); go_home(); done() }

    /* BLPOP. One that is still under way when LEAVE is carried out finds what LEAVE has pushed,
     * or a grant, for which it looks first. */
    :: d_step { my.pop == OUT && (my.at == WAITING && RUNS || LEAVING) ->
                put_on_register_apart();
                if
                :: grants != 0 -> pop_grant(my)
                :: grants == 0 && my.at == WAITING -> join_line()
                :: grants == 0 && my.at != WAITING -> my.pop = FAREWELL
                fi;
                done() }

    /* A grant came. A fresh one is believed; TAKE_GRANT is sent and not waited for. */
#ifndef CHOSEN
#ifdef PROMPT
    :: d_step { HAS_GRANT && RUNS && BELIEVABLE ->
                take_off_register();
                if
                :: K == my.grant -> K_left = LIFETIME; my.left = LIFETIME
                :: else -> my.left = my.grant_left
                fi;
                accept_grant(); believe(); done() }
    :: d_step { HAS_GRANT && RUNS && BELIEVABLE && FAULT -> fault();
                my.left = my.grant_left; accept_grant(); believe(); done() }
#else
    :: d_step { HAS_GRANT && BELIEVABLE ->
                my.left = my.grant_left;
#ifdef BELIEVE_STALE
                my.left = GRANT_TIMEOUT;
#endif
                accept_grant(); believe(); done() }
#endif
#endif
    /* Any other is asked about. */
    :: d_step { HAS_GRANT && RUNS && (VALID || ANY_WILL_DO) ->
                take_off_register();
                accept_grant();
#ifdef CHOSEN
                K = my.own;
#endif
                K_left = LIFETIME;
                my.left = LIFETIME;
                hang_up(); my.at = TAKING; done() }
    :: d_step { HAS_GRANT && RUNS && !(VALID || ANY_WILL_DO) ->
                take_off_register(); hang_up(); ask(); done() }
    :: d_step { my.at == TAKING && RUNS -> believe(); done() }
    /* Its answer is lost, or the wait is cancelled just then. */
    :: d_step { my.at == TAKING && FAULT -> fault();
#if defined(FORGET_GRANT) || !defined(CHOSEN)
#ifndef FORGET_GRANT
                abandon(my.own);
#endif
                my.own = 0; new_token(); my.own = token;
#endif
                ask(); done() }
    :: d_step { (my.at == TAKING || HAS_GRANT) && FAULT -> fault();
#ifndef FORGET_GRANT
                if :: my.at == TAKING -> abandon(my.own) :: else -> abandon(my.grant) fi;
#endif
                go_home(); done() }

    /* The connection of the pop breaks. The client notices, or Redis, or neither. */
    :: d_step { my.at == WAITING && FAULT -> fault(); hang_up(); ask(); done() }
#ifdef PROMPT
    :: d_step { my.at == WAITING && my.pop == IN && FAULT -> fault();
                place_of(me); line[i] = DEAD_CONNECTION; hang_up(); ask(); done() }
    :: d_step { my.at == WAITING && (my.pop == IN || my.pop == GRANTED) && FAULT -> fault();
                hang_up(); my.pop = SILENT; done() }
    :: d_step { my.at == WAITING && my.pop == IN && FAULT -> fault();
                place_of(me); line[i] = DEAD_CONNECTION; my.pop = SILENT; done() }
#else
    :: d_step { my.pop == IN -> hang_up(); done() }
#endif

    /* LEAVE, at the deadline (with a last try) or cancelled. The pop's answer decides. */
    :: d_step { my.at == WAITING && RUNS && FREE -> acquire(); say_farewell(); my.at = WON; done() }
    :: d_step { my.at == WAITING && RUNS && !FREE -> say_farewell(); my.at = LEFT; done() }
    :: d_step { my.at == WAITING && RUNS -> say_farewell(); my.at = CANCELLED; done() }
#ifdef NO_FAREWELL
    :: d_step { my.at == LEFT && RUNS -> leave(); done() }
#else
    :: d_step { my.at == LEFT && RUNS && (my.pop == FAREWELL || my.pop == SILENT) ->
                leave(); done() }
#endif
#ifdef AWAIT_SILENCE
    :: d_step { my.at == WON && RUNS && my.pop == SILENT && my.left == 0 -> go_home(); done() }
    :: d_step { my.at == WON && RUNS && (my.pop == FAREWELL || my.pop == GRANTED) ->
#else
    :: d_step { my.at == WON && RUNS && my.pop != OUT ->
#endif
                /* A grant that came all the same was over before the last try, or came after the
                 * end of what that got. */
#ifdef TAKE_BOTH
                if :: my.grant != 0 && K == my.grant -> K_left = LIFETIME :: else fi;
#else
                if :: my.grant != 0 -> abandon(my.grant) :: else fi;
#endif
                believe(); done() }
    :: d_step { my.at == CANCELLED && RUNS && (my.pop == FAREWELL || my.pop == SILENT) ->
                leave(); done() }
    :: d_step { my.at == CANCELLED && RUNS && my.pop == GRANTED && VALID && WAITED_FOR ->
                give_to_next(my.grant); leave(); done() }
    :: d_step { my.at == CANCELLED && RUNS && my.pop == GRANTED && VALID && NOT_WAITED_FOR ->
                give_up(my.grant); leave(); done() }
    :: d_step { my.at == CANCELLED && RUNS && my.pop == GRANTED && !VALID -> leave(); done() }
    /* The answer to LEAVE is lost: it is sent again, or given up. */
    :: d_step { (my.at == LEFT || my.at == WON) && FREE && FAULT -> fault();
                acquire(); my.at = WON; done() }
    :: d_step { (my.at == LEFT || my.at == WON) && !FREE && FAULT -> fault();
                my.left = 0; my.fence = 0; my.at = LEFT; done() }
    :: d_step { (my.at == WAITING || my.at == LEFT || my.at == WON) && FAULT -> fault();
                abandon(my.own); go_home(); done() }

    /* The body, and what renews its lock. */
    :: d_step { my.at == HOLDING && RUNS ->
                stop_renewing(); my.left = 0; my.at = RELEASING; done() }
#ifndef PROMPT
    :: d_step { my.at == HOLDING && my.told == UNTOLD && K == my.own ->
                K_left = LIFETIME; my.told_left = LIFETIME; my.told = KEPT; done() }
    :: d_step { my.at == HOLDING && my.told == UNTOLD && K != my.own ->
                my.told = LOST; done() }
    :: d_step { my.at == HOLDING && my.told == KEPT ->
                my.left = my.told_left; stop_renewing(); done() }
    :: d_step { my.at == HOLDING && my.told == LOST -> my.left = 0; stop_renewing(); done() }
    :: d_step { my.at == HOLDING && my.told != UNTOLD -> stop_renewing(); done() }
#endif

    /* RELEASE. It stays under way when it has been carried out: its answer may be lost, and then
     * it is sent again and finds its work done. */
    :: d_step { my.at == RELEASING && HOLDS && WAITED_FOR -> give_to_next(my.own); done() }
    :: d_step { my.at == RELEASING && HOLDS && NOT_WAITED_FOR -> give_up(my.own); done() }
    :: d_step { my.at == RELEASING && RUNS && (K != my.own || AT_ANY_PACE) -> go_home(); done() }
#ifdef RELEASE_NEEDS_MEMORY
    :: d_step { my.at == RELEASING && HOLDS && WAITED_FOR && FAULT -> fault(); go_home(); done() }
#endif

#ifdef PROMPT
    /* Abandoned, by my keeper. */
    :: d_step { job_of == me && RUNS && my.at != DEAD && job == K && WAITED_FOR ->
                give_to_next(job); done() }
    :: d_step { job_of == me && RUNS && my.at != DEAD && job == K && NOT_WAITED_FOR ->
                give_up(job); done() }

    /* WATCH. Who sees a grant lying on the list twice has no blocking pop in Redis. */
#ifndef NO_WATCH
    :: d_step { my.at == WAITING && RUNS && my.look == 0 ->
                put_on_register();
                token = 0;
                if
                :: K == 0 ->
                    pass_on();
#ifndef SEE_NO_OWN_GRANT
                    token = 1
#else
                    token = 0
#endif
                :: K != 0 && K == grants -> token = 1
                :: else
                fi;
                my.look = NEXT_LOOK;
                if
                :: token == 0 -> my.lying = false
                :: token == 1 && !my.lying -> my.lying = true; my.look = 0
                :: token == 1 && my.lying -> hang_up(); ask()
                fi;
                done() }
#endif

    /* Frozen, killed; lapsed from the register, which a waiter who is well never is. */
    :: d_step { STIRS && !my.frozen && FAULT -> fault(); my.frozen = true; done() }
    :: d_step { my.frozen -> my.frozen = false; done() }
    :: d_step { STIRS && FAULT -> fault();
                n = (OWNS(my) && K == my.own -> K : 0); die(); done() }
    :: d_step { my.at == WAITING && my.pop == IN && FAULT -> fault();
                place_of(me); line[i] = DEAD_CONNECTION; n = 0; die(); done() }
    :: d_step { my.registered && (my.frozen || my.at != WAITING) -> take_off_register(); done() }
#else
    /* Killed, and another in its place. */
    :: d_step { my.at != IDLE -> go_home(); done() }

    /* The first sending of an ACQUIRE, or a LEAVE that was not answered, is still on its way. */
    :: d_step { my.at == ASKING && late == 0 -> late = my.own; done() }
    :: d_step { my.at == WAITING && late == 0 -> late = my.own; abandon(my.own); go_home(); done() }
#endif
    od
}

/* -- Time, the server, and what is left on its way --------------------------------------------- */

inline down(x) { if :: x > 0 -> x-- :: else fi }
inline tick_for(c) {
    down(c.left);
    down(c.grant_left);
#if !defined(BELIEVE_STALE) && !defined(TAKE_ANY)
    /* The token of a grant that was over before it was taken up is of no use to anybody. */
    if :: c.grant_left == 0 -> c.grant = 0; c.grant_fence = 0 :: else fi;
#endif
#ifdef PROMPT
    down(c.look)
#else
    down(c.told_left)
#endif
}

#ifdef PROMPT
#ifdef NO_WATCH
#define LOOKS(c)    false
#else
#define LOOKS(c)    (c.look == 0)
#endif
/* Neither the client nor what it has sent will do anything before time passes. */
#define CALM(c) \
    (c.at == IDLE || c.at == DEAD || \
     (c.at == HOLDING && (c.frozen || c.left > 0)) || \
     (c.at == WAITING && (c.frozen || ((c.pop == IN || c.pop == SILENT) && !LOOKS(c)))) || \
     ((c.at == ASKING || c.at == ACQUIRED || c.at == TAKING) && c.frozen) || \
     ((c.at == LEFT || c.at == WON || c.at == CANCELLED) && c.pop != OUT && c.frozen) || \
     (c.at == RELEASING && K != c.own && c.frozen) || STARES(c))
#define JOB_CALM \
    (job == 0 || job != K || client[job_of - 1].frozen || client[job_of - 1].at == DEAD)
#define MAY_TICK \
    (CALM(client[0]) && CALM(client[1]) && CALM(client[2]) && JOB_CALM)
#define HAS_DEAD_CONNECTION \
    (line[0] == DEAD_CONNECTION || line[1] == DEAD_CONNECTION || line[2] == DEAD_CONNECTION || \
     line[3] == DEAD_CONNECTION || line[4] == DEAD_CONNECTION)
#else
#define MAY_TICK true
#endif

active proctype world() {
    do
    :: d_step { MAY_TICK ->
#ifdef PROMPT
                if :: UNSERVED -> ownerless++ :: else fi;
                assert(ownerless <= BOUND);     /* L2 */
#endif
                down(K_left);
                if :: K_left == 0 -> K = 0 :: else fi;
                down(grants_left);
                if :: grants_left == 0 -> empty_list() :: else fi;
                tick_for(client[0]); tick_for(client[1]); tick_for(client[2]);
                done() }
#ifdef PROMPT
    /* The lock is deleted by hand, or flushed with all else. That its holder goes on believing
     * until it is told is no fault of the protocol. */
    :: d_step { K != 0 && FAULT -> fault();
                K = 0; K_left = 0; empty_list();
                rob(client[0]); rob(client[1]); rob(client[2]); done() }
    /* It is reset: HELD names the holder, RESET ends what that one holds, and may be sent again at
     * any time. Here too the holder believes until it is told. */
    :: d_step { K != 0 && K != grants && doomed == 0 && FAULT -> fault(); doomed = K; done() }
    :: d_step { doomed != 0 && K == doomed && K != grants ->
                rob_if_its(client[0]); rob_if_its(client[1]); rob_if_its(client[2]);
                if :: WAITED_FOR -> pass_on() :: else -> give_up(doomed) fi;
                done() }
#ifdef RESET_ANY
    :: d_step { doomed != 0 && K != doomed && K != 0 && K != grants -> pass_on(); done() }
#endif
    :: d_step { doomed != 0 -> doomed = 0; done() }
    /* Companion keys vanish: the register, or the list of grants. */
    :: d_step { WAITED_FOR && FAULT -> fault();
                client[0].registered = false; client[1].registered = false;
                client[2].registered = false; done() }
    :: d_step { grants != 0 && FAULT -> fault(); empty_list(); done() }
    /* Redis notices that a connection is dead. */
    :: d_step { HAS_DEAD_CONNECTION -> leave_line(DEAD_CONNECTION); done() }
#else
    /* WATCH, by the keeper of whoever waits or has just waited. */
    :: d_step { K == 0 -> pass_on(); done() }
#ifdef WATCH_BLINDLY
    :: d_step { K != 0 -> pass_on(); done() }
#endif
    /* The late call arrives. */
    :: d_step { late != 0 && (K == 0 || K == grants || K == late) ->
                next_fence(); set_lock(late, LIFETIME); late = 0; done() }
    :: d_step { late != 0 -> late = 0; done() }
    /* Abandoned, twice or once or never. */
    :: d_step { job != 0 && K == job && WAITED_FOR -> give_to_next(job); done() }
    :: d_step { job != 0 && K == job && NOT_WAITED_FOR -> give_up(job); done() }
    :: d_step { job != 0 -> job = 0; done() }
#endif
    od
}
