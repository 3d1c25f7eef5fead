"use strict";
(() => {
  const root = document.documentElement;
  const find = (selector, from = document) => [...from.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);
  root.classList.add("scripted");

  // Light or dark follows the system until the reader chooses.
  const kept = { get: () => { try { return localStorage.getItem("parity-theme"); } catch { return null; } },
                 set: (theme) => { try { localStorage.setItem("parity-theme", theme); } catch { /* a private window */ } } };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  if (["light", "dark"].includes(kept.get())) root.dataset.theme = kept.get();
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    kept.set(root.dataset.theme);
    drawAgain();
  });
  system.addEventListener("change", () => drawAgain());

  // Filter and sort. An item matches or not; rows, cells and cases follow their items.
  const items = find(".item");
  const cases = find(".case");
  const rows = find(".matrix tbody tr");
  const declared = { rows: [...rows], cases: [...cases] };
  const chosen = { name: byId("filter-name"), precision: byId("filter-precision"), status: byId("filter-status"), code: byId("filter-code"), sort: byId("sort") };
  const itemById = new Map(items.map((item) => [item.id, item]));

  const matches = (item, words) => {
    const { name, precision, status, codes } = item.dataset;
    const text = `${name} ${precision} ${codes}`.toLowerCase();
    return words.every((word) => text.includes(word))
      && (!chosen.precision.value || precision === chosen.precision.value)
      && (!chosen.status.value || chosen.status.value.split(" ").includes(status))
      && (!chosen.code.value || ` ${codes} `.includes(` ${chosen.code.value} `));
  };

  const filter = () => {
    const words = chosen.name.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const item of items) {
      item.hidden = !matches(item, words);
      count += !item.hidden;
    }
    for (const one of cases) one.hidden = find(".item", one).every((item) => item.hidden);
    for (const row of rows) {
      let some = false;
      for (const cell of find("td[data-items]", row)) {
        const shown = cell.dataset.items.split(" ").some((id) => !itemById.get(id)?.hidden);
        cell.classList.toggle("dimmed", !shown);
        some ||= shown;
      }
      row.hidden = !some;
    }
    for (const cell of find(".matrix [data-column]")) {
      cell.hidden = Boolean(chosen.precision.value) && cell.dataset.column !== chosen.precision.value;
    }
    byId("count").textContent = `${count === items.length ? "" : `${count} of `}${items.length} ${items.length === 1 ? "item" : "items"}`;
    byId("nothing").hidden = count > 0 || items.length === 0;
  };

  const sort = () => {
    const worst = (element) => Math.max(...(element.matches("tr") ? [Number(element.dataset.sort)] : find(".item", element).map((item) => Number(item.dataset.sort))));
    const name = (element) => (element.matches("tr") ? element.dataset.name : element.querySelector(".case-name").textContent);
    for (const [list, parent] of [[declared.rows, document.querySelector(".matrix tbody")], [declared.cases, byId("case-list")]]) {
      const order = [...list];
      if (chosen.sort.value === "worst") order.sort((a, b) => worst(b) - worst(a));
      if (chosen.sort.value === "name") order.sort((a, b) => name(a).localeCompare(name(b)));
      parent.append(...order);
    }
  };

  const clear = () => {
    for (const control of [chosen.name, chosen.precision, chosen.status, chosen.code]) control.value = "";
    filter();
  };
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  chosen.name.addEventListener("input", filter);
  for (const control of [chosen.precision, chosen.status, chosen.code]) control.addEventListener("change", filter);
  chosen.sort.addEventListener("change", sort);
  byId("clear").addEventListener("click", clear);

  // Keys: / moves to the filter, Escape clears it, and arrows move through the matrix.
  const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches?.("input, select, textarea");
    if (event.key === "/" && !typing) {
      event.preventDefault();
      chosen.name.focus();
      chosen.name.select();
    } else if (event.key === "Escape" && event.target === chosen.name) {
      clear();
      chosen.name.blur();
    } else if (step[event.key] && event.target.closest?.(".matrix a")) {
      const [across, down] = step[event.key];
      const shown = rows.length ? find(".matrix tbody tr:not([hidden])") : [];
      const grid = shown.map((row) => find("th, td:not([hidden])", row).map((cell) => cell.querySelector("a")));
      const y = grid.findIndex((row) => row.includes(event.target));
      if (y < 0) return;
      let [i, j] = [grid[y].indexOf(event.target), y];
      do { i += across; j += down; } while (grid[j] && i in grid[j] && !grid[j][i]);
      if (grid[j]?.[i]) {
        event.preventDefault();
        grid[j][i].focus();
      }
    }
  });

  // A link to an item opens it, even if the filter hides it.
  const open = () => {
    const target = byId(decodeURIComponent(location.hash.slice(1)));
    if (!target?.matches("details")) return;
    if (target.hidden || target.closest("[hidden]")) clear();
    for (let one = target; one; one = one.parentElement?.closest("details")) one.open = true;
    if (target.matches(".case")) { const bad = target.querySelector(".item.failed, .item.error"); if (bad) bad.open = true; }
    target.scrollIntoView();
    target.querySelector("summary").focus({ preventScroll: true });
  };
  addEventListener("hashchange", open);
  for (const link of find('a[href^="#"]')) link.addEventListener("click", () => { if (location.hash === link.hash) open(); });

  // Copy text, even where the browser offers no clipboard to pages that are opened from a disk.
  const copy = async (text) => {
    try { await navigator.clipboard.writeText(text); return true; } catch { /* below */ }
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  for (const button of find(".copy")) {
    button.addEventListener("click", async () => {
      const done = await copy(button.dataset.copy);
      button.textContent = done ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }

  // Plots are drawn when they come into view, in the colours of the theme.
  const data = JSON.parse(byId("plots").textContent);
  const ITO = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
  const SYMBOLS = ["circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon"];
  const DASHES = ["solid", "dash", "dot"];

  const theme = () => {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(`--${name}`).trim();
    return { fg: of("fg"), quiet: of("quiet"), line: of("line"), pass: of("pass"), fail: of("fail"), font: getComputedStyle(document.body).fontFamily };
  };
  const axis = (colours, more) => ({ gridcolor: colours.line, linecolor: colours.line, zeroline: false, automargin: true, ...more });
  const titled = (text) => ({ text, standoff: 8, font: { size: 11 } });
  const layout = (colours, more) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 50, r: 12, t: 10, b: 40 },
    font: { family: colours.font, size: 11, color: colours.quiet }, hovermode: "x", hoverlabel: { font: { size: 11 } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } }, ...more,
  });
  // Return a logarithmic axis with labels at powers of ten or, where these are few, at 1, 2 and 5 times each.
  const log = (colours, values, more) => {
    const known = values.filter((value) => value > 0).map(Math.log10);
    let [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [-1, 1];
    [low, high] = [low - 0.06 * (high - low) - 0.04, high + 0.06 * (high - low) + 0.04];
    const decades = high - low, every = Math.ceil(decades / 5), ticks = [];
    for (let power = Math.floor(low); power <= high; power++) {
      if (decades > 2 && power % every) continue;
      for (const factor of decades > 2 ? [1] : [1, 2, 5]) ticks.push(factor * 10 ** power);
    }
    const text = (tick) => (tick >= 0.001 && tick < 1e5 ? String(Number(tick.toPrecision(1))) : tick.toExponential(0).replace("+", ""));
    return axis(colours, { type: "log", range: [low, high], tickvals: ticks, ticktext: ticks.map(text), ...more });
  };

  const draw = {
    profile(one, colours) {
      const middle = one.at.map((at) => at + (one.span - 1) / 2);
      const line = (name, y, colour, dash, mode) => ({ x: middle, y, name, mode, line: { color: colour, width: 2, dash, shape: "hvh" }, marker: { size: 5, color: colour } });
      const traces = [line("candidate", one.error, colours.fail, "solid", one.at.length > 32 ? "lines" : "lines+markers"), line("expected", one.expected, colours.pass, "dash", "lines")];
      if (one.spoiled.some(Boolean)) {
        const bad = one.spoiled.map((count, i) => [count, middle[i]]).filter(([count]) => count);
        traces.push({ x: bad.map(([, at]) => at), y: bad.map(() => 1.02), yaxis: "y2", name: "NaN or Inf", text: bad.map(([count]) => `${count} NaN or Inf`), mode: "markers", marker: { symbol: "x", size: 8, color: colours.fg }, hoverinfo: "text" });
      }
      const length = one.at.length ? one.at[one.at.length - 1] + one.span : 0;
      const heads = one.parted ? Array.from({ length: one.parted - 1 }, (_, i) => (i + 1) * length / one.parted - 0.5) : [];
      return [traces, layout(colours, {
        xaxis: axis(colours, { title: titled(one.parted ? `index; lines part ${one.parted} heads` : "index"), tickvals: one.span === 1 && one.at.length <= 8 ? one.at : undefined }),
        yaxis: log(colours, [...one.error, ...one.expected], { title: titled("RMS error") }),
        yaxis2: { overlaying: "y", visible: false, range: [0, 1.1] },
        shapes: heads.map((x) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: colours.quiet, width: 1, dash: "dot" } })),
      })];
    },
    histogram(one, colours) {
      const traces = [
        { type: "bar", x: one.at, y: one.error, width: one.width, name: "candidate", marker: { color: colours.fail, opacity: 0.75 } },
        { x: one.at, y: one.expected, name: "expected", mode: "lines", line: { color: colours.pass, width: 2, dash: "dash", shape: "hvh" } },
      ];
      const [low, high] = [Math.floor(Math.min(...one.at)), Math.ceil(Math.max(...one.at))];
      const ticks = Array.from({ length: Math.max(high - low + 1, 1) }, (_, i) => low + i);
      return [traces, layout(colours, {
        bargap: 0,
        xaxis: axis(colours, { title: titled("error over the expected RMS error"), tickvals: ticks, ticktext: ticks.map((t) => (t === 0 ? "1" : `10<sup>${t}</sup>`)) }),
        yaxis: axis(colours, { title: titled("share of elements"), tickformat: ".0%" }),
      })];
    },
    depth(one, colours, width) {
      const times = one.lines.map((line) => line.error.map((error, j) => (line.expected[j] ? error / line.expected[j] : null)));
      const traces = one.lines.flatMap((line, i) => {
        const colour = ITO[i % ITO.length];
        const look = { line: { color: colour, width: 2, dash: DASHES[Math.floor(i / ITO.length) % DASHES.length] }, marker: { symbol: SYMBOLS[i % SYMBOLS.length], size: 7, color: colour }, mode: "lines+markers", legendgroup: line.name, name: line.name };
        return [
          { ...look, x: line.at, y: line.margin },
          { ...look, x: line.at, y: times[i], yaxis: "y2", showlegend: false },
        ];
      });
      return [traces, layout(colours, {
        margin: { l: 55, r: 12, t: 10, b: 40 }, hovermode: "closest",
        ...(width < 700 ? {} : { legend: { x: 1.01, y: 1, font: { size: 11 } } }),
        xaxis: axis(colours, { title: titled("layer"), dtick: one.lines.every((line) => line.at.length <= 24) ? 1 : undefined, anchor: "y2" }),
        yaxis: log(colours, [1, ...one.lines.flatMap((line) => line.margin)], { title: titled("margin"), domain: [0.54, 1] }),
        yaxis2: log(colours, times.flat(), { title: titled("error / expected"), domain: [0, 0.46] }),
        shapes: [limit(colours)],
      })];
    },
    stages(one, colours) {
      const at = one.ends.map((_, i) => i + 1);
      const line = (name, y, colour, dash, symbol) => ({ x: at, y, name, text: one.ends, hovertemplate: "%{text}<br>%{y:.2g}", mode: "lines+markers", line: { color: colour, width: 2, dash }, marker: { size: 6, symbol } });
      const traces = [line("error of the value", one.whole, colours.fg, "dot", "circle"), line("added by the stage", one.added, colours.fail, "solid", "square"), line("expected of the stage", one.expected, colours.pass, "dash", "diamond")];
      return [traces, layout(colours, {
        hovermode: "closest",
        xaxis: axis(colours, { title: titled("stage") }),
        yaxis: log(colours, [...one.whole, ...one.added, ...one.expected], { title: titled("relative error") }),
      })];
    },
    steps(one, colours) {
      const line = (name, y, colour, dash, symbol, yaxis = "y") => ({ x: one.at, y, name, yaxis, mode: "lines+markers", line: { color: colour, width: 2, dash }, marker: { size: 6, symbol } });
      return [[line("loss of the candidate", one.loss, colours.fail, "solid", "circle"), line("of the reference, same step", one.golden, colours.pass, "dash", "diamond"), line("margin", one.margin, colours.fg, "solid", "square", "y2")], layout(colours, {
        xaxis: axis(colours, { title: titled("step"), anchor: "y2", dtick: one.at.length <= 20 ? 1 : undefined }),
        yaxis: axis(colours, { title: titled("loss"), domain: [0.45, 1] }),
        yaxis2: log(colours, [1, ...one.margin], { title: titled("margin"), domain: [0, 0.37] }),
        shapes: [{ ...limit(colours), yref: "y2" }],
      })];
    },
  };
  const limit = (colours) => ({ type: "line", xref: "paper", x0: 0, x1: 1, yref: "y", y0: 1, y1: 1, line: { color: colours.fg, width: 1, dash: "dash" } });

  const drawn = new Set();
  const drawOne = (element) => {
    const one = data[element.dataset.plot];
    if (!one || !draw[one.kind] || !window.Plotly) return;
    drawn.add(element);
    const [traces, look] = draw[one.kind](one, theme(), element.clientWidth);
    window.Plotly.react(element, traces, look, { displaylogo: false, displayModeBar: false, responsive: true });
  };
  const drawAgain = () => drawn.forEach(drawOne);
  const watcher = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (isIntersecting) { watcher.unobserve(target); drawOne(target); }
    }
  }, { rootMargin: "300px" });
  // The plotting library is compressed; once it is unpacked, the page's policy accepts it by its hash.
  const packed = byId("library").content.textContent;
  const unpack = async () => {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const text = new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    const library = document.createElement("script");
    library.textContent = await text;
    document.head.append(library);
    for (const element of find("[data-plot]")) watcher.observe(element);
  };
  if (packed) unpack();
  addEventListener("beforeprint", () => find("details[open] [data-plot]").filter((one) => one.offsetParent && !drawn.has(one)).forEach(drawOne));

  // The first failures are open from the start.
  for (const item of find(".item.failed, .item.error").slice(0, 3)) item.open = true;
  filter();
  if (location.hash) open();
})();
