/* A lock with limit=2 as a model for spin: what places add to the protocol in lock.pml. `make model`
 * checks it, and `make model ARGS="PLACES NO_TAKE_BACK"` shows how a mistake does harm.
 *
 * A client is a process that wants a place again and again. Each script of place_scripts.py is one
 * step, and so is what a client does with an answer. What can go wrong (FAULTS times in a run): an
 * answer to ACQUIRE is lost, a client is killed anywhere, a client stops until the lifetime of its
 * place or of its grant is over. Time passes only when all clients are calm, that is when no client
 * has anything left to do. Then, in this order: the keepers of all that wait look (WATCH), and what
 * has no owner any more lapses. Keepers may look at any other time, too.
 *
 * Properties, all of them assertions:
 *   S7   who holds a place has his token there, so there are two holders at most (done)
 *   S2   only the token that is at a place frees it (pass_on)
 *   L2   when all are calm, no place is free while a client waits, unless its holder has vanished
 *        since the keepers looked; and after they have looked, not even then
 *   surplus  when all are calm, a place that has a token has an owner, or will lapse because of a
 *        fault: no grant without a waiter stays behind
 *
 * Not in the model: what lock.pml has (late calls, lost answers to other scripts, frozen waiters,
 * chosen tokens, lost keys, fences), several waiters in one process, and different limits.
 *
 * Each other macro is a mistake that somebody could make; checker.py says which.
 */

#ifndef CLIENTS
#define CLIENTS 3
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#define PLACES 2

/* -- What Redis knows. 0 is no token, nobody --------------------------------------------------- */

byte K[PLACES];
bool lapses[PLACES];    /* its owner will not release it: it is free at the end of its lifetime */
typedef Grant { byte token; byte place };
Grant grant[PLACES];    /* the list of grants */
byte grants;            /* how many are on it */
byte line[CLIENTS];     /* clients, from 1, whose pop blocks, in their order */

/* -- What clients know ------------------------------------------------------------------------- */

mtype = {
    IDLE,
    ASKING,     /* ACQUIRE is under way, perhaps again */
    ACQUIRED,   /* it got a place, its answer is under way */
    UNHEARD,    /* the answer will not come: the keeper releases what the token holds */
    WAITING,
    SLOW,       /* it was stopped with a grant, which may be over when it goes on */
    HOLDING,
    OVERDUE,    /* stopped for longer than its lifetime, and does not know */
    LEFT,       /* LEAVE did not get a place; what did the pop bring? */
    WON,        /* it got one */
    CANCELLED,  /* it did not try */
    DEAD
};
mtype = { OUT, IN, GRANTED, FAREWELL };     /* the blocking pop, as in lock.pml */

typedef Client {
    mtype at = IDLE;
    mtype pop = OUT;
    bool registered;
    byte own, place;                        /* its token, and the place that this holds */
    byte granted, granted_place             /* what the pop was answered with */
};
Client client[CLIENTS];
#define my client[_pid]
#define me (_pid + 1)

byte faults = FAULTS;
bool looked;            /* all keepers have looked, and nothing has happened since */
bool vanished;          /* a place has lapsed since they looked */

/* Only of use within a step; 0 between steps. */
byte n, i, j, k, token;
byte number[20];

/* -- The end of every step --------------------------------------------------------------------- */

/* Tokens are numbered in the order in which they stand, so states that differ in names only are
 * one. */
inline rename(x) {
    if
    :: x != 0 -> if :: number[x] == 0 -> n++; number[x] = n :: else fi; x = number[x]
    :: else
    fi
}
inline rename_all() {
    n = 0;
    rename(K[0]); rename(K[1]); rename(grant[0].token); rename(grant[1].token);
    i = 0;
    do
    :: i < CLIENTS -> rename(client[i].own); rename(client[i].granted); i++
    :: else -> break
    od;
    i = 0;
    do :: i < 20 -> number[i] = 0; i++ :: else -> break od
}
/* For spin's simulations, as in lock.pml. */
#define STATE(c) c.at, c.pop, c.own, c.place + 1, c.granted, c.registered
inline say(c) { printf("      %e %e own=%d place=%d granted=%d registered=%d\n", STATE(c)) }
inline say_how_it_is() {
    printf("By %d: K=%d,%d lapses=%d,%d grants=%d,%d\n",
        _pid + 1, K[0], K[1], lapses[0], lapses[1], grant[0].token, grant[1].token);
    say(client[0]); say(client[1]); say(client[2])
}
inline clear() { n = 0; i = 0; j = 0; k = 0; token = 0 }
inline done() {
    i = 0;
    do
    :: i < CLIENTS ->
        assert(client[i].at != HOLDING || K[client[i].place] == client[i].own);     /* S7 */
        i++
    :: else -> break
    od;
#ifdef TELL_CLIENTS_APART
    say_how_it_is();
#endif
    rename_all();
    clear()
}

/* -- Tokens, and the queue --------------------------------------------------------------------- */

inline unlike(x) { if :: x == token -> k = 1 :: else fi }
inline new_token() {
    token = 0; k = 1;
    do
    :: k == 1 ->
        token++; k = 0; j = 0;
        unlike(K[0]); unlike(K[1]); unlike(grant[0].token); unlike(grant[1].token);
        do
        :: j < CLIENTS -> unlike(client[j].own); unlike(client[j].granted); j++
        :: else -> break
        od
    :: else -> break
    od
}
inline join_line() {
    j = 0;
    do :: line[j] != 0 -> j++ :: else -> break od;
    line[j] = me; my.pop = IN
}
inline leave_line(who) {
    j = 0;
    do :: j < CLIENTS && line[j] != who -> j++ :: else -> break od;
    do
    :: j < CLIENTS - 1 -> line[j] = line[j + 1]; j++
    :: j == CLIENTS - 1 -> line[j] = 0; j++
    :: j == CLIENTS -> break
    od
}
inline first_off_list(c) {
    c.granted = grant[0].token; c.granted_place = grant[0].place; c.pop = GRANTED;
    grants--;
    grant[0].token = grant[1].token; grant[0].place = grant[1].place;
    grant[1].token = 0; grant[1].place = 0
}
/* Redis serves blocked pops after the script. What a dead connection is given is lost. */
inline serve() {
    do
    :: grants > 0 && line[0] != 0 ->
        k = line[0] - 1;
        leave_line(k + 1);
        first_off_list(client[k]);
        if
        :: client[k].at == DEAD ->
            if
            :: K[client[k].granted_place] == client[k].granted ->
                lapses[client[k].granted_place] = true
            :: else
            fi;
            client[k].pop = OUT; client[k].granted = 0; client[k].granted_place = 0
        :: else
        fi
    :: else -> break
    od
}

/* -- What the scripts share -------------------------------------------------------------------- */

#define LIES(p) \
    (K[p] != 0 && (grants > 0 && grant[0].token == K[p] || grants > 1 && grant[1].token == K[p]))

inline count_registered() {     /* in k */
    j = 0; k = 0;
    do
    :: j < CLIENTS -> if :: client[j].registered -> k++ :: else fi; j++
    :: else -> break
    od
}
inline off_list(at) {
    if :: at == 0 -> grant[0].token = grant[1].token; grant[0].place = grant[1].place :: else fi;
    grant[1].token = 0; grant[1].place = 0;
    grants--
}
inline void_grants(p) {
#ifdef VOID_ALL
    do :: grants > 0 -> off_list(0) :: else -> break od
#else
#ifndef KEEP_GRANTS
    if :: grants > 1 && grant[1].place == p -> off_list(1) :: else fi;
    if :: grants > 0 && grant[0].place == p -> off_list(0) :: else fi
#else
    skip
#endif
#endif
}
inline set_lock(p, t) {
    K[p] = t; lapses[p] = false;
    void_grants(p)
}
inline grant_place(p) {
    new_token();
    set_lock(p, token);
    assert(grants < PLACES);
    grant[grants].token = token;
#ifndef GRANT_WITHOUT_PLACE
    grant[grants].place = p;
#endif
    grants++
}
inline pass_on(p, t) {
    assert(K[p] == t);      /* S2 */
    count_registered();
    if
    :: k > 0 -> grant_place(p); serve()
    :: else -> K[p] = 0; lapses[p] = false
    fi
}
/* RELEASE: of a token whose place is known, or is looked for. */
inline release() {
    i = my.place;
#ifdef RELEASE_ANY
    if :: K[i] != 0 -> pass_on(i, K[i]) :: else fi
#else
    if :: K[i] == my.own -> pass_on(i, my.own) :: else fi
#endif
}
inline find_and_release(t) {
    if
    :: K[0] == t -> pass_on(0, t)
#ifndef NO_FIND
    :: K[0] != t && K[1] == t -> pass_on(1, t)
#endif
    :: else
    fi
}
inline take_back(p) { if :: LIES(p) -> K[p] = 0; lapses[p] = false :: else fi }
inline unregister() {
    my.registered = false;
#ifndef NO_TAKE_BACK
    count_registered();
#ifdef TAKE_BACK_AT_ONCE
    k = 0;
#endif
    if
    :: k == 0 ->
        take_back(0); take_back(1);
        do :: grants > 0 -> off_list(0) :: else -> break od
    :: else
    fi
#endif
}
/* In i the place that can be taken, PLACES if there is none. */
inline choose() {
    if
#ifndef FORGET_OWN
    :: K[0] == my.own -> i = 0
    :: K[1] == my.own -> i = 1
    :: K[0] != my.own && K[1] != my.own ->
#else
    :: true ->
#endif
        if
        :: K[0] == 0 -> i = 0
        :: K[0] != 0 && K[1] == 0 -> i = 1
        :: K[0] != 0 && K[1] != 0 && LIES(0) -> i = 0
        :: K[0] != 0 && K[1] != 0 && !LIES(0) && LIES(1) -> i = 1
        :: else -> i = PLACES
        fi
    fi
}
/* WATCH, by the keeper of `c`. */
inline grant_vanished(p) {
    if :: i < 1 && K[p] == 0 -> grant_place(p); i++ :: else fi
}
inline watch(c) {
    c.registered = true;
    i = grants;
    grant_vanished(0);
#ifndef WATCH_FIRST
    grant_vanished(1);
#endif
    serve()
}

/* -- What clients do --------------------------------------------------------------------------- */

inline hang_up() { leave_line(me); my.pop = OUT; my.granted = 0; my.granted_place = 0 }
inline go_home() { hang_up(); my.own = 0; my.place = 0; my.at = IDLE }
inline farewell() { if :: my.pop == IN -> leave_line(me); my.pop = FAREWELL :: else fi }
inline take(p) { set_lock(p, my.own); my.place = p }
inline dooms(p) {
    if :: K[p] != 0 && (K[p] == my.own || K[p] == my.granted) -> lapses[p] = true :: else fi
}
inline dies() {
    dooms(0); dooms(1);
    my.own = 0; my.place = 0; my.granted = 0; my.granted_place = 0;
    if :: my.pop != IN -> my.pop = OUT :: else fi;
    my.at = DEAD
}
#define LEAVING     (my.at == LEFT || my.at == WON || my.at == CANCELLED)
#define HAS_GRANT   ((my.at == WAITING || my.at == LEFT) && my.pop == GRANTED)
#ifdef TAKE_ANY
#define VALID       true
#else
#define VALID       (K[my.granted_place] == my.granted)
#endif
#define FAULT       (faults > 0)
#define ACT         looked = false
#define CALM(c) \
    (c.at == IDLE || c.at == HOLDING || c.at == OVERDUE || c.at == DEAD || c.at == SLOW || \
     (c.at == WAITING && c.pop == IN))
#if CLIENTS == 4
#define ALL_CALM (CALM(client[0]) && CALM(client[1]) && CALM(client[2]) && CALM(client[3]))
#else
#define ALL_CALM (CALM(client[0]) && CALM(client[1]) && CALM(client[2]))
#endif

active [CLIENTS] proctype clients() {
    do
    /* ACQUIRE. Its answer may be lost: then it is sent again, or its caller gets an error. */
    :: d_step { my.at == IDLE -> ACT; new_token(); my.own = token; my.at = ASKING; done() }
    :: d_step { my.at == ASKING -> ACT;
                choose();
                if
                :: i < PLACES -> take(i); my.at = ACQUIRED
                :: else ->
                    my.at = WAITING;
#ifndef REGISTER_APART
                    my.registered = true
#endif
                fi;
                done() }
    :: d_step { my.at == ACQUIRED -> ACT; my.at = HOLDING; done() }
    :: d_step { my.at == ACQUIRED && FAULT -> ACT; faults--; my.at = ASKING; done() }
    :: d_step { my.at == ACQUIRED && FAULT -> ACT; faults--; my.at = UNHEARD; done() }
    :: d_step { my.at == UNHEARD -> ACT; find_and_release(my.own); go_home(); done() }

    /* BLPOP: a grant first, or what LEAVE has pushed. */
    :: d_step { my.pop == OUT && (my.at == WAITING || LEAVING) -> ACT;
#ifdef REGISTER_APART
                my.registered = (my.at == WAITING);
#endif
                if
                :: grants > 0 -> first_off_list(my)
                :: grants == 0 && my.at == WAITING -> join_line()
                :: else -> my.pop = FAREWELL
                fi;
                done() }

    /* TAKE_GRANT. */
    :: d_step { HAS_GRANT && VALID -> ACT;
                unregister();
                my.own = my.granted; my.place = my.granted_place; lapses[my.place] = false;
                hang_up(); my.at = HOLDING; done() }
    :: d_step { HAS_GRANT && !VALID -> ACT; unregister(); hang_up(); my.at = ASKING; done() }

    /* WATCH, at any time. */
    :: d_step { my.at == WAITING && (K[0] == 0 || K[1] == 0) -> ACT; watch(my); done() }

    /* LEAVE, at the deadline (with a last try) or cancelled. The pop's answer decides. */
    :: d_step { my.at == WAITING -> ACT;
                choose();
                if :: i < PLACES -> take(i); my.at = WON :: else -> my.at = LEFT fi;
                unregister(); farewell(); done() }
    :: d_step { my.at == WAITING -> ACT; unregister(); farewell(); my.at = CANCELLED; done() }
    :: d_step { (my.at == LEFT || my.at == CANCELLED) && my.pop == FAREWELL -> ACT;
                go_home(); done() }
    :: d_step { my.at == WON && my.pop == FAREWELL -> ACT; hang_up(); my.at = HOLDING; done() }
    :: d_step { (my.at == WON || my.at == CANCELLED) && my.pop == GRANTED -> ACT;
#ifndef FORGET_GRANT
                find_and_release(my.granted);
#endif
                if :: my.at == WON -> hang_up(); my.at = HOLDING :: else -> go_home() fi;
                done() }

    /* RELEASE. */
    :: d_step { my.at == HOLDING || my.at == OVERDUE -> ACT;
                release(); go_home(); done() }

    /* Stopped, or killed. Its connection and its registration outlive it. */
    :: d_step { my.at == HOLDING && FAULT -> ACT; faults--;
                lapses[my.place] = true; my.at = OVERDUE; done() }
    :: d_step { my.at == WAITING && my.pop == GRANTED && FAULT -> ACT; faults--;
                dooms(0); dooms(1); my.at = SLOW; done() }
    :: d_step { my.at == SLOW -> ACT; my.at = WAITING; done() }
    :: d_step { my.at != IDLE && my.at != DEAD && FAULT -> ACT; faults--; dies(); done() }
    :: d_step { my.at == DEAD && my.pop == IN -> ACT; leave_line(me); my.pop = OUT; done() }
    :: d_step { my.at == DEAD && my.registered && ALL_CALM && looked -> ACT;
                my.registered = false;
                if :: LIES(0) -> lapses[0] = true :: else fi;
                if :: LIES(1) -> lapses[1] = true :: else fi;
                done() }
    od
}

/* -- Time -------------------------------------------------------------------------------------- */

inline count_waiting() {    /* in n; those that are registered and do not take grants in k */
    j = 0; n = 0; k = 0;
    do
    :: j < CLIENTS ->
        if :: client[j].at == WAITING -> n++ :: else fi;
        if
        :: (client[j].at == DEAD || client[j].at == SLOW) && client[j].registered -> k++
        :: else
        fi;
        j++
    :: else -> break
    od
}
inline find_owner(p) {      /* in i: whether the place has one */
    j = 0; i = 0;
    do
    :: j < CLIENTS ->
        if
        :: client[j].at == HOLDING && client[j].place == p && client[j].own == K[p] -> i = 1
        :: else
        fi;
        j++
    :: else -> break
    od
}
inline judge(p) {
    find_owner(p);
    assert((K[p] == 0 && n == 0) || i == 1 || lapses[p] || (LIES(p) && k > 0))
}
#define MAY_LAPSE(p) (ALL_CALM && looked && K[p] != 0 && lapses[p])

active proctype time() {
    do
    :: d_step { ALL_CALM && !looked ->
                count_waiting();
                assert(n == 0 || vanished || (K[0] != 0 && K[1] != 0));     /* L2 */
                vanished = false;
                n = 0;
                do
                :: n < CLIENTS -> if :: client[n].at == WAITING -> watch(client[n]) :: else fi; n++
                :: else -> break
                od;
                looked = ALL_CALM;      /* Else it is looked at again. */
                done() }
    :: d_step { ALL_CALM && looked ->
                count_waiting(); judge(0); judge(1);    /* L2, surplus */
                clear() }
    /* A grant may outlast its place on the list, whose lifetime each grant renews. */
    :: d_step { MAY_LAPSE(0) -> K[0] = 0; lapses[0] = false; ACT; vanished = true; done() }
    :: d_step { MAY_LAPSE(1) -> K[1] = 0; lapses[1] = false; ACT; vanished = true; done() }
    :: d_step { grants > 0 && ALL_CALM && K[grant[0].place] == 0 -> off_list(0); ACT; done() }
    od
}
