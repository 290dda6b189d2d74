// Opens the compressed prompts, tests and programs of a problem when they are asked for, searches in all of them, and
// shows how two programs differ.  Every text of theirs becomes a text node.
(function () {
  const section = document.getElementById("programs");
  if (!section) return;
  const facts = JSON.parse(document.getElementById("program-facts").textContent);
  const chips = Array.from(section.querySelectorAll(".chips > details"));
  const search = document.getElementById("program-search");
  const verdict = document.getElementById("program-verdict");
  const exact = document.getElementById("program-case");
  const status = document.getElementById("program-found");
  const UNOPENED = "This browser cannot open the compressed programs; one of 2023 or later can (DecompressionStream).";
  const AROUND = 3; // lines before and after a difference that are shown
  const AT_ONCE = 16; // problems that a search has open
  const SVG = document.querySelector("svg").namespaceURI;
  const none = function () { return true; };
  let fits = none, needle = "", scan = 0;

  // The element of a tag with attributes, and what is in it: texts and elements.
  function make(tag, attributes, ...content) {
    const one = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
    one.append(...content);
    return one;
  }

  async function opened(id) {
    const packed = atob(document.getElementById(id).textContent);
    const bytes = new Uint8Array(packed.length);
    for (let at = 0; at < packed.length; at++) bytes[at] = packed.charCodeAt(at);
    const stream = new Response(bytes).body.pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  // Text as nodes: hidden characters, which stand between U+0001 and U+0002, and what is searched for are marked.
  function nodes(text) {
    const found = [];
    text.split(/[\u0001\u0002]/).forEach(function (part, at) {
      if (at % 2) {
        found.push(make("b", { class: "hidden" }, part));
        return;
      }
      const where = needle ? folded(part) : "";
      let start = 0;
      for (let hit = needle ? where.indexOf(needle) : -1; hit >= 0; hit = where.indexOf(needle, start)) {
        found.push(part.slice(start, hit), make("mark", {}, part.slice(hit, hit + needle.length)));
        start = hit + needle.length;
      }
      found.push(part.slice(start));
    });
    return found;
  }

  function block(text) {
    return make("pre", { tabindex: "0" }, make("code", {}, ...nodes(text)));
  }

  function note(...content) {
    return make("p", { class: "note" }, ...content);
  }

  function plural(number, noun) {
    return number.toLocaleString("en") + " " + noun + (number === 1 ? "" : "s");
  }

  function key(outcome) {
    const [picture, box] = ["svg", "rect"].map(function (tag) { return document.createElementNS(SVG, tag); });
    for (const one of [picture, box]) {
      one.setAttribute("width", "16");
      one.setAttribute("height", "12");
    }
    picture.setAttribute("class", "key");
    picture.setAttribute("aria-hidden", "true");
    box.setAttribute("class", "o-" + facts.outcomes[outcome]);
    picture.append(box);
    return picture;
  }

  function folded(text) {
    const low = text.toLowerCase();
    return exact.checked || low.length !== text.length ? text : low;
  }

  // "0, 3, 5-9" of each group.
  function draws(numbers) {
    const groups = new Map();
    for (let at = 0; at < numbers.length; at += 3) {
      const own = groups.get(numbers[at + 2]) || [];
      const last = own[own.length - 1];
      if (last && last[1] === numbers[at] - 1) last[1]++;
      else own.push([numbers[at], numbers[at]]);
      groups.set(numbers[at + 2], own);
    }
    return Array.from(groups, function ([group, own]) {
      const runs = own.map(function ([first, last]) { return first === last ? "" + first : first + "-" + last; });
      return (facts.groups[group] ? facts.groups[group] + ": " : "") + runs.join(", ");
    }).join("; ");
  }

  function lengths(numbers) {
    const all = numbers.filter(function (_, at) { return at % 3 === 1; });
    const least = Math.min(...all), most = Math.max(...all);
    return least === most ? plural(least, "token") : least + " to " + plural(most, "token");
  }

  function asked(title, text, before) {
    if (!text && !before) return [];
    const own = make("details", { class: "asked" }, make("summary", {}, title));
    own.addEventListener("toggle", async function () {
      if (before) {
        own.append(note("All prompts of the run begin with:"), block((await opened("d0")).prompt));
        own.append(note("This problem's goes on with:"));
      }
      own.append(block(text));
    }, { once: true });
    return [own];
  }

  function summary(number, [, outcome, detail, numbers]) {
    const words = make("span", {}, plural(numbers.length / 3, "sample") + ", " + lengths(numbers));
    const said = detail ? [" ", make("q", {}, ...nodes(detail)), " "] : [" "];
    return make("summary", {}, key(outcome), make("b", {}, number + " " + facts.outcomes[outcome]), ...said, words);
  }

  function row(number, program, pick) {
    const own = make("details", {}, summary(number, program));
    own.addEventListener("toggle", function () {
      if (!own.open || own.childElementCount > 1) return;
      const which = program[3].length > 3 || facts.groups.length ? "Samples " : "Sample ";
      own.append(note(which + draws(program[3])), block(program[0]));
    });
    const box = make("input", { type: "checkbox", "aria-label": "compare program " + number });
    box.addEventListener("change", function () { pick(box); });
    const item = make("li", {}, own, make("label", {}, box, " compare"));
    item.hidden = !fits(program);
    return [item, own, box];
  }

  // A line of a difference, with its sign before it.
  function changed([kind, line, from, to]) {
    const middle = to > from ? [make("b", {}, ...nodes(line.slice(from, to)))] : [];
    const around = [nodes(line.slice(0, from)), nodes(line.slice(Math.max(from, to)))];
    const tag = { " ": "span", "-": "del", "+": "ins" }[kind];
    return make(tag, {}, kind + " ", ...around[0], ...middle, ...around[1], "\n");
  }

  function difference(one, other, programs) {
    const names = [one, other].map(function (at) {
      return "program " + (at + 1) + " (" + facts.outcomes[programs[at][1]] + ")";
    });
    const lines = diffLines(programs[one][0], programs[other][0]);
    const near = new Set();
    lines.forEach(function ([kind], at) {
      for (let by = -AROUND; kind !== " " && by <= AROUND; by++) near.add(at + by);
    });
    const code = make("code", {});
    for (let at = 0; at < lines.length; at++) {
      let end = at;
      while (end < lines.length && !near.has(end)) end++;
      if (end - at > 1) {
        code.append(make("i", {}, "  … " + plural(end - at, "equal line") + "\n"));
        at = end;
      }
      if (at < lines.length) code.append(changed(lines[at]));
    }
    const changes = lines.filter(function ([kind]) { return kind !== " "; }).length;
    const close = make("button", { type: "button" }, "close");
    const title = make("h3", { tabindex: "-1" }, "From " + names[0] + " to " + names[1]);
    const said = changes ? plural(changes, "line") + " removed (-) or added (+)." : "The two texts are equal.";
    return [title, note(said, " ", close), make("pre", { class: "diff", tabindex: "0" }, code), close];
  }

  async function show(chip) {
    const place = chip.querySelector(".held");
    if (place.childElementCount) return;
    let record;
    try {
      record = await opened("d" + chip.dataset.n);
    } catch (error) {
      place.replaceChildren(make("p", {}, UNOPENED));
      return;
    }
    if (place.childElementCount) return;
    const view = make("div", { class: "difference", role: "region", "aria-label": "Difference of two programs" });
    view.hidden = true;
    let picked = [];
    const rows = [];
    function pick(box) {
      picked = picked.filter(function (one) { return one !== box; });
      if (box.checked) picked.push(box);
      if (picked.length > 2) picked.shift().checked = false;
      view.hidden = picked.length < 2;
      if (view.hidden) return;
      const [one, other] = picked.map(function (own) {
        return rows.findIndex(function (row) { return row[2] === own; });
      });
      const [title, words, pre, close] = difference(one, other, record.programs);
      view.replaceChildren(title, words, pre);
      close.addEventListener("click", function () {
        for (const own of picked) own.checked = false;
        picked[1].focus();
        picked = [];
        view.hidden = true;
      });
      title.focus();
    }
    record.programs.forEach(function (program, at) { rows.push(row(at + 1, program, pick)); });
    const list = make("ol", {}, ...rows.map(function (row) { return row[0]; }));
    place.append(...asked("Prompt", record.prompt, facts.beginning), ...asked("Tests", record.tests, false));
    place.append(view, list);
    const first = rows.find(function (row) { return !row[0].hidden; });
    if (first) first[1].open = true;
  }

  function fitting(wanted, text) {
    return function (program) {
      if (wanted && facts.outcomes[program[1]] !== wanted) return false;
      return !text || [program[0], program[2]].some(function (one) {
        return folded(one.replace(/[\u0001\u0002]/g, "")).includes(text);
      });
    };
  }

  // How many programs of each problem fit; null where another search has begun meanwhile.
  async function hits(own) {
    const found = [];
    for (let at = 0; at < chips.length && own === scan; at += AT_ONCE) {
      const some = chips.slice(at, at + AT_ONCE).map(function (chip) { return opened("d" + chip.dataset.n); });
      const records = await Promise.all(some);
      for (const record of records) found.push(record.programs.filter(fits).length);
    }
    return own === scan ? found : null;
  }

  // Look through all problems, and leave those that have a program that fits.
  async function filter() {
    const own = ++scan;
    const all = !search.value && !verdict.value;
    needle = folded(search.value);
    fits = all ? none : fitting(verdict.value, needle);
    section.setAttribute("aria-busy", "true");
    let found;
    try {
      found = all ? [] : await hits(own);
    } catch (error) {
      status.textContent = UNOPENED;
      return;
    }
    if (!found) return;
    section.removeAttribute("aria-busy");
    section.classList.toggle("searched", !all);
    chips.forEach(function (chip, at) {
      chip.hidden = !all && !found[at];
      chip.querySelector(".hits").textContent = found[at] ? plural(found[at], "hit") : "";
      chip.querySelector(".held").replaceChildren();
      if (chip.open && !chip.hidden) show(chip);
    });
    const programs = found.reduce(function (sum, one) { return sum + one; }, 0);
    const problems = found.filter(Boolean).length;
    status.textContent = all ? "" : plural(programs, "program") + " in " + plural(problems, "problem");
  }

  for (const chip of chips) chip.addEventListener("toggle", function () { if (chip.open) show(chip); });
  let waiting = 0;
  search.addEventListener("input", function () { clearTimeout(waiting); waiting = setTimeout(filter, 200); });
  verdict.addEventListener("change", filter);
  exact.addEventListener("change", filter);
  document.getElementById("program-tools").hidden = false;
  if (search.value || verdict.value) filter();
})();
