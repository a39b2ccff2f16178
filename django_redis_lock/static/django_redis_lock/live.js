/* Keeps the page "Held locks" up to date: asks for it again every few seconds, and makes what is shown like it. Attributes say how:
     data-live         what is kept up to date; its other data-* are texts for this script
     data-each         a list, whose entries data-id tells apart
     data-whole        is replaced as a whole, if it has changed     data-omitted: the new page does not have it
     data-own          is this script's own
     data-copy         is copied by a click
     data-up, data-down   seconds that run on from data-at, as those of a <progress> do */
"use strict";

// Buttons that copy a command. Without a secure context browsers have no clipboard, but can copy a selection.
(() => {
  async function copy(button) {
    const code = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
    } catch {
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    const text = button.textContent;
    button.textContent = button.dataset.copied;
    setTimeout(() => (button.textContent = text), 2000);
  }
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", () => copy(button));
  }
})();

(() => {
  const page = document.querySelector("[data-live]");
  if (!page) return;
  const patterns = JSON.parse(page.dataset.durations);
  let loadedAt = performance.now();

  function duration(seconds) {
    const whole = Math.floor(seconds);
    const parts = {
      seconds: whole % 60,
      minutes: Math.floor(whole / 60) % 60,
      hours: Math.floor(whole / 3600) % 24,
      days: Math.floor(whole / 86400),
    };
    const pattern = whole >= 86400 ? 4 : whole >= 3600 ? 3 : whole >= 60 ? 2 : whole >= 1 ? 1 : 0;
    return patterns[pattern].replace(/%\((\w+)\)d/g, (_, unit) => parts[unit]);
  }

  function tick() {
    const gone = (performance.now() - loadedAt) / 1000;
    for (const element of page.querySelectorAll("[data-at]")) {
      const at = Number(element.dataset.at);
      if ("up" in element.dataset) say(element, duration(at + gone));
      else if ("down" in element.dataset) say(element, duration(Math.max(0, at - gone)));
      else element.value = Math.max(0, at - gone);
    }
  }

  function say(element, text) {
    if (element.textContent === text) return;
    // The text node stays, and with it the user's selection.
    if (element.childNodes.length === 1 && element.firstChild.nodeType === 3) element.firstChild.data = text;
    else element.textContent = text;
  }

  // Makes `old` like `next`. What is there in both stays, and with it the focus and the selection.
  function morph(old, next) {
    if (old.nodeType !== 1) {
      if (old.data !== next.data) old.data = next.data;
      return;
    }
    if ("own" in old.dataset || "omitted" in next.dataset) return;
    if ("copy" in old.dataset) {
      old.dataset.copy = next.dataset.copy;
      return;
    }
    for (const { name } of [...old.attributes]) if (!next.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of next.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    if ("whole" in old.dataset) replace(old, next);
    else if ("each" in old.dataset) morphEach(old, next);
    else morphChildren(old, next);
  }

  function morphChildren(old, next) {
    const rest = [...old.childNodes];
    for (const child of [...next.childNodes]) {
      const same = rest[0]?.nodeName === child.nodeName ? rest.shift() : null;
      if (same) morph(same, child);
      else old.insertBefore(child, rest[0] ?? null);
    }
    for (const child of rest) leave(child);
  }

  function morphEach(list, next) {
    const before = new Map([...list.children].map((child) => [child.dataset.id, child]));
    const wanted = new Set([...next.children].map((child) => child.dataset.id));
    let here = list.firstElementChild;
    for (const entry of [...next.children]) {
      // Only what is out of place is moved: a move takes the focus away.
      while (here && !wanted.has(here.dataset.id)) here = leave(here);
      const child = before.get(entry.dataset.id);
      if (child) morph(child, entry);
      if (child === here && here) here = here.nextElementSibling;
      else list.insertBefore(child ?? entry, here);
    }
    while (here) here = leave(here);
  }

  // A link that is replaced loses the focus: the new one to the same address gets it.
  function replace(element, next) {
    if (element.innerHTML === next.innerHTML) return;
    const active = document.activeElement;
    const alike = () => [...element.querySelectorAll("a")].filter((link) => link.href === active.href);
    const at = alike().indexOf(active);
    element.replaceChildren(...next.childNodes);
    if (at >= 0) (alike()[at] ?? alike()[0] ?? pause).focus({ preventScroll: true });
  }

  // The focus goes to the row that follows, not back to the page's top. Returns that.
  function leave(child) {
    const next = child.nextElementSibling;
    const near = next ?? child.previousElementSibling;
    const had = child.contains(document.activeElement);
    child.remove();
    if (had) (near?.querySelector("a, input") ?? pause).focus({ preventScroll: true });
    return next;
  }

  function refill(next) {
    const active = document.activeElement;
    loadedAt = performance.now();
    morph(page, next);
    tick();
    countSelected();
    if (active && active !== document.activeElement && page.contains(active)) active.focus({ preventScroll: true });
  }

  const trouble = page.querySelector("[data-trouble]");
  const every = Math.min(Number(page.dataset.every) * 1000, 2 ** 31 - 1); // setTimeout's most.
  let timer = 0;
  let asking = null;
  let paused = !(every > 0);
  let failing = false;
  let over = false;

  function plan() {
    clearTimeout(timer);
    if (!paused && !over && !document.hidden) timer = setTimeout(ask, every);
  }

  // What is below the window is asked for when it comes into sight.
  function wanted() {
    const address = new URL(location);
    address.searchParams.set("live", "1");
    for (const element of page.querySelectorAll("[data-whole][id]")) {
      if (element.getBoundingClientRect().top < innerHeight) address.searchParams.set(element.id, "1");
    }
    return address;
  }

  async function ask() {
    if (asking || over) return;
    asking = new AbortController();
    const patience = setTimeout(() => asking.abort(), Math.max(20000, 2 * every));
    try {
      const answer = await fetch(wanted(), { redirect: "manual", signal: asking.signal });
      if (answer.type === "opaqueredirect" || answer.status === 403 || answer.status === 404) {
        over = true;
        say(trouble, page.dataset.ended);
      } else if (!answer.ok) {
        throw new Error(answer.status);
      } else {
        const made = new DOMParser().parseFromString(await answer.text(), "text/html");
        if (!paused) refill(made.querySelector("[data-live]"));
        if (failing) {
          say(trouble, page.dataset.again);
          setTimeout(() => failing || say(trouble, ""), 3000);
        }
        failing = false;
      }
    } catch {
      failing = true;
      say(trouble, page.dataset.away);
    } finally {
      clearTimeout(patience);
      asking = null;
      plan();
    }
  }

  const pause = page.querySelector("[data-pause]");
  pause.hidden = page.querySelector("[data-pace]").hidden = paused;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    if (paused) {
      clearTimeout(timer);
      clearInterval(ticking);
    } else {
      ticking = setInterval(tick, 1000);
      ask();
    }
  });

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer);
    else if (!paused) ask();
  });

  const all = page.querySelector("[data-all]");
  // What is not shown on a phone is not selected, either.
  const boxes = () => [...page.querySelectorAll("tbody .action-select")].filter((box) => box.checked || box.closest("tr").offsetParent);

  function countSelected() {
    if (!all) return;
    const checked = boxes().filter((box) => box.checked).length;
    all.checked = checked > 0 && checked === boxes().length;
    all.indeterminate = checked > 0 && !all.checked;
    for (const box of boxes()) box.closest("tr").classList.toggle("selected", box.checked);
  }

  if (all) {
    all.hidden = false;
    all.addEventListener("change", () => {
      for (const box of boxes()) box.checked = all.checked;
      countSelected();
    });
    page.addEventListener("change", countSelected);
    countSelected();
  }

  let ticking = setInterval(tick, 1000);
  plan();
})();
