/* Keeps the page "Held locks" up to date. The page says what belongs where:
     data-live         address of the page's data; beside it, in data-*, the texts for this script
     data-each="rows"  one child for each entry, made from the <template> in it; data-id tells them apart
     data-text="name"  its text            data-href, data-value, data-aria, data-mark, data-title  an attribute
     data-html="name"  its content, HTML; everything else is set as text
     data-if="name"    hidden if there is no such thing; data-unless: if there is
     data-up, data-down="held"  seconds that run on from data-at   data-run, data-max  those of a <progress> */
"use strict";

(() => {
  const page = document.querySelector("[data-live]");
  if (!page) return;
  const patterns = JSON.parse(page.dataset.durations);
  const written = new WeakMap(); // Element: the HTML last set.
  const started = new WeakMap(); // Element: when its data-at was right.
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

  function gone(element) {
    return (performance.now() - (started.get(element) ?? loadedAt)) / 1000;
  }

  function tick() {
    for (const element of page.querySelectorAll("[data-at]")) {
      const at = Number(element.dataset.at);
      if (element.dataset.up) say(element, duration(at + gone(element)));
      else if (element.dataset.down) say(element, duration(Math.max(0, at - gone(element))));
      else element.value = Math.max(0, at - gone(element));
    }
  }

  function say(element, text) {
    if (element.textContent === text) return;
    // The text node stays, and with it the user's selection.
    if (element.childNodes.length === 1 && element.firstChild.nodeType === 3) element.firstChild.data = text;
    else element.textContent = text;
  }

  function set(element, name, value) {
    if (value === "" || value === null || value === undefined) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }

  function there(value) {
    return Array.isArray(value) ? value.length > 0 : Boolean(value);
  }

  function run(element, seconds) {
    set(element, "data-at", seconds);
    started.set(element, performance.now());
  }

  function fillOne(element, data) {
    const wants = element.dataset;
    if (wants.up || wants.down) {
      const seconds = data[wants.up || wants.down];
      run(element, seconds);
      if (seconds === null || seconds === undefined) say(element, data[wants.text] ?? "");
    } else if (wants.text && wants.text in data) {
      say(element, data[wants.text]);
    }
    if (wants.run) {
      set(element, "max", data[wants.max]);
      run(element, data[wants.max] === null ? null : data[wants.run]);
    }
    if (wants.href) set(element, "href", data[wants.href]);
    if (wants.value && wants.value in data) element.value = data[wants.value];
    if (wants.aria) set(element, "aria-label", data[wants.aria]);
    if (wants.mark) set(element, "data-is", data[wants.mark]);
    if (wants.title) set(element, "title", data[wants.title]);
    if (wants.if && wants.if in data) element.hidden = !there(data[wants.if]);
    if (wants.unless && wants.unless in data) element.hidden = there(data[wants.unless]);
  }

  // A link that is replaced loses the focus: the new one to the same address gets it.
  function fillHtml(element, html) {
    if (html === undefined || html === written.get(element)) return;
    written.set(element, html);
    const active = document.activeElement;
    const alike = () => [...element.querySelectorAll("a")].filter((link) => link.href === active.href);
    const at = alike().indexOf(active);
    const made = new DOMParser().parseFromString(html, "text/html");
    element.replaceChildren(...[...made.body.childNodes].map((node) => document.adoptNode(node)));
    if (at >= 0) (alike()[at] ?? alike()[0] ?? pause).focus({ preventScroll: true });
  }

  function fill(element, data) {
    fillOne(element, data);
    if (element.dataset.html) return fillHtml(element, data[element.dataset.html]);
    for (const child of element.children) {
      if (child.tagName === "TEMPLATE") continue;
      if (child.dataset.each) {
        fillOne(child, data);
        fillEach(child, data[child.dataset.each] ?? []);
      } else {
        fill(child, data);
      }
    }
  }

  function fillEach(list, entries) {
    const template = list.querySelector("template");
    const before = new Map();
    for (const child of list.children) if (child !== template) before.set(child.dataset.id, child);
    const wanted = new Set(entries.map((entry) => entry.id));
    let last = template;
    for (const entry of entries) {
      let child = before.get(entry.id);
      before.delete(entry.id);
      if (!child) {
        child = template.content.firstElementChild.cloneNode(true);
        child.dataset.id = entry.id;
      }
      fill(child, entry);
      // Only what is out of place is moved: a move takes the focus away.
      while (last.nextElementSibling && !wanted.has(last.nextElementSibling.dataset.id)) {
        leave(last.nextElementSibling);
      }
      if (last.nextElementSibling !== child) last.after(child);
      last = child;
    }
    while (last.nextElementSibling) leave(last.nextElementSibling);
  }

  // The focus goes to the row that follows, not back to the page's top.
  function leave(child) {
    if (child.contains(document.activeElement)) {
      const next = child.nextElementSibling ?? child.previousElementSibling;
      const there = next && next.tagName !== "TEMPLATE" ? next.querySelector("a, input") : null;
      child.remove();
      (there ?? pause).focus({ preventScroll: true });
    } else {
      child.remove();
    }
  }

  function refill(data) {
    const active = document.activeElement;
    loadedAt = performance.now();
    fill(page, data);
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
    const address = new URL(page.dataset.live, location);
    for (const element of page.querySelectorAll("[data-html]")) {
      if (element.getBoundingClientRect().top < innerHeight) address.searchParams.set(element.dataset.html, "1");
    }
    return address;
  }

  async function ask() {
    if (asking || over) return;
    asking = new AbortController();
    const patience = setTimeout(() => asking.abort(), Math.max(20000, 2 * every));
    try {
      const answer = await fetch(wanted(), {
        headers: { Accept: "application/json" },
        redirect: "manual",
        signal: asking.signal,
      });
      if (answer.type === "opaqueredirect" || answer.status === 403 || answer.status === 404) {
        over = true;
        say(trouble, page.dataset.ended);
      } else if (!answer.ok) {
        throw new Error(answer.status);
      } else {
        const data = await answer.json();
        if (!paused) refill(data);
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
  const boxes = () => [...page.querySelectorAll("tbody .action-select")];

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
