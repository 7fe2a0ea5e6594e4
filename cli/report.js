"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const config = data.config || {};
  const at = (id) => document.getElementById(id);
  const css = (name) => `var(--${name})`;

  // ------------------------------------------------------------ Elements and numbers

  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children.filter((child) => child != null));
    return node;
  }
  function svg(tag, attributes = {}, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text != null) node.textContent = text;
    return node;
  }
  const finite = (x) => typeof x === "number" && Number.isFinite(x);
  const digits = (x, n) => x.toLocaleString("en-US", {maximumFractionDigits: n, minimumFractionDigits: n});
  const three = (x) => {
    const size = Math.abs(x);
    return digits(x, size >= 100 || x === 0 ? 0 : size >= 10 ? 1 : 2);
  };
  function scaled(x, base, units) {
    let unit = 0;
    while (Math.abs(x) >= base && unit + 1 < units.length) { x /= base; ++unit; }
    return (unit === 0 ? digits(x, 0) : three(x)) + units[unit];
  }
  const bytes = (x) => scaled(x, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
  const count = (x) => scaled(x, 1000, ["", "k", "M", "B", "T"]);
  const ms = (us) => (us >= 1e6 ? three(us / 1e6) + " s" : us >= 1e3 ? three(us / 1e3) + " ms" : three(us) + " µs");
  const milliseconds = (us) => digits(us / 1e3, 4) + " ms";
  const percent = (x) => digits(100 * x, x !== 0 && Math.abs(x) < 0.1 ? 1 : 0) + " %";
  function seconds(s) {
    if (s < 100) return three(s) + " s";
    const m = Math.floor(s / 60);
    return m < 100 ? `${m} min ${Math.round(s % 60)} s` : `${Math.floor(m / 60)} h ${m % 60} min`;
  }
  const power = (x) => (x === 0 ? "0" : x.toExponential(1).replace(".0e", "e").replace("e-", "e−").replace("e+", "e"));

  /** Round values that cover lo to hi, about `about` of them. */
  function ticks(lo, hi, about) {
    if (!(hi > lo)) return [lo];
    const rough = (hi - lo) / about;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
    const result = [];
    for (let i = Math.ceil(lo / step - 1e-9); i * step <= hi + step * 1e-9; ++i) result.push(i * step || 0); // no -0
    return result;
  }
  /** Texts for an axis, without the zeros at the end that all have. */
  function axisTexts(values, format) {
    let texts = values.map((value) => (value === 0 ? "0" : format(value)));
    const tail = /(\.\d*?)0(?=\D*$)/;
    const others = () => texts.filter((text) => text !== "0");
    while (others().length && others().every((text) => tail.test(text))) {
      texts = texts.map((text) => text.replace(tail, "$1").replace(/\.(?=\D*$)/, ""));
    }
    return texts;
  }
  /** The same in powers of two, for bytes. */
  function byteTicks(hi, about) {
    const step = 2 ** Math.max(0, Math.ceil(Math.log2(hi / about)));
    const result = [];
    for (let x = 0; x <= hi; x += step) result.push(x);
    return result;
  }

  // ------------------------------------------------------------ Tooltip

  const tip = at("tip");
  function showTip(event, title, rows) {
    tip.replaceChildren(el("b", {}, title), ...rows.map(([name, value]) =>
      el("div", {}, el("span", {}, name), value)));
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
    tip.style.left = Math.max(6, x) + "px";
    tip.style.top = Math.max(6, Math.min(event.clientY + 14, innerHeight - box.height - 6)) + "px";
  }
  const hideTip = () => { tip.style.display = "none"; };
  addEventListener("scroll", hideTip, {passive: true});

  // Figures are drawn for the width they have, and again when that changes.
  const figures = [];
  function figure(id, draw) {
    const node = at(id);
    let drawn = 0;
    const redraw = () => {
      const width = Math.floor(node.clientWidth);
      if (width > 0) { drawn = width; node.replaceChildren(draw(width)); }
    };
    new ResizeObserver(() => { if (Math.floor(node.clientWidth) !== drawn) redraw(); }).observe(node);
    figures.push(redraw);
    redraw();
    return redraw;
  }
  function legend(id, items) {
    at(id).replaceChildren(...items.map(({color, name, value, shape}) => {
      if (!name) return el("li", {class: "break"});
      const swatch = el("i", {class: "swatch " + (shape || "")});
      if (shape !== "dashed") swatch.style.background = color;
      return el("li", {}, swatch, name, value ? el("b", {}, value) : null);
    }));
  }
  function missing(id, text) {
    at(id).replaceChildren(el("p", {class: "missing"}, text));
  }

  // ------------------------------------------------------------ Line charts

  /** Means over as many neighbours as share a pixel or two: long runs stay light. */
  function thinned(points, most) {
    if (points.length <= most) return points;
    const result = [];
    for (let i = 0; i < most; ++i) {
      const part = points.slice(Math.floor(i * points.length / most), Math.floor((i + 1) * points.length / most));
      result.push([0, 1].map((k) => part.reduce((sum, point) => sum + point[k], 0) / part.length));
    }
    return result;
  }
  /** The mean of neighbours on both sides, as many on each. */
  function smoothed(points) {
    const reach = Math.round(Math.min(15, points.length / 40));
    return points.map(([x], i) => {
      const side = Math.min(reach, i, points.length - 1 - i);
      const near = points.slice(i - side, i + side + 1);
      return [x, near.reduce((sum, point) => sum + point[1], 0) / near.length];
    });
  }
  const path = (points, x, y) => points.map(([a, b], i) =>
    (i ? "L" : "M") + x(a).toFixed(1) + " " + y(b).toFixed(1)).join("");

  /**
   * series: [{name, points, color, width, opacity, marks, smooth, format}]; levels: horizontal
   * dashed lines {name, value}. `zero` makes the axis begin there.
   */
  function lineChart({series, levels = [], height, zero, format, axisFormat = format, label, upper}) {
    series = series.filter((one) => one.points.length > 0);
    return (width) => {
      const narrow = width < 480;
      const box = {left: narrow ? 40 : 46, right: 8, top: 8, bottom: 24};
      const h = narrow ? Math.min(height, 210) : height;
      const xs = series.flatMap((one) => one.points.map((point) => point[0]));
      const ys = series.flatMap((one) => one.points.map((point) => point[1])).concat(levels.map((level) => level.value));
      const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
      // Single spikes must not flatten all the rest.
      const sorted = [...ys].sort((a, b) => a - b);
      let hi = sorted[sorted.length - 1];
      const usual = sorted[Math.floor(0.98 * (sorted.length - 1))];
      if (sorted.length > 50 && usual > 0 && hi > 3 * usual) hi = 1.5 * usual;
      let lo = zero ? Math.min(0, sorted[0]) : sorted[0];
      const room = (hi - lo || Math.abs(hi) || 1) * 0.06;
      hi += room; if (!zero) lo -= room;
      if (upper != null) hi = Math.min(Math.max(hi, lo + 1e-9), upper);
      const x = (v) => box.left + (x1 > x0 ? (v - x0) / (x1 - x0) : 0.5) * (width - box.left - box.right);
      const y = (v) => h - box.bottom - (Math.min(v, hi) - lo) / (hi - lo) * (h - box.top - box.bottom);
      const root = svg("svg", {viewBox: `0 0 ${width} ${h}`, height: h, role: "img", "aria-label": label});
      const levelsOfGrid = ticks(lo, hi, h < 190 ? 4 : 5);
      const texts = axisTexts(levelsOfGrid, axisFormat);
      levelsOfGrid.forEach((value, i) => {
        root.append(svg("line", {class: "grid", x1: box.left, x2: width - box.right, y1: y(value), y2: y(value)}));
        root.append(svg("text", {x: box.left - 8, y: y(value) + 4, "text-anchor": "end"}, texts[i]));
      });
      root.append(svg("line", {class: "axis", x1: box.left, x2: width - box.right, y1: h - box.bottom, y2: h - box.bottom}));
      for (const value of ticks(x0, x1, width / 95).filter(Number.isInteger)) {
        root.append(svg("text", {x: x(value), y: h - 6, "text-anchor": "middle"}, digits(value, 0)));
      }
      for (const level of levels) {
        root.append(svg("line", {stroke: css("faint"), "stroke-dasharray": "5 4", x1: box.left, x2: width - box.right,
          y1: y(level.value), y2: y(level.value)}));
      }
      for (const one of series) {
        const shown = thinned(one.points, Math.floor(width * 1.5));
        const stroke = {fill: "none", stroke: one.color, "stroke-linejoin": "round", "stroke-linecap": "round"};
        if (one.smooth && one.points.length > 40) {
          root.append(svg("path", {...stroke, d: path(shown, x, y), "stroke-width": 1, opacity: 0.32}));
          root.append(svg("path", {...stroke, d: path(smoothed(shown), x, y), "stroke-width": 2}));
        } else {
          root.append(svg("path", {...stroke, d: path(shown, x, y), "stroke-width": 1.75}));
        }
        if ((one.marks && one.points.length <= 40) || one.points.length === 1) {
          for (const [a, b] of one.points) {
            root.append(svg("circle", {cx: x(a), cy: y(b), r: 3.5, fill: one.color, stroke: css("paper"), "stroke-width": 1.5}));
          }
        }
      }
      const cross = svg("line", {class: "cross", y1: box.top, y2: h - box.bottom, visibility: "hidden"});
      const dots = series.map((one) => svg("circle", {r: 4, fill: one.color, stroke: css("paper"), "stroke-width": 1.5,
        visibility: "hidden"}));
      const area = svg("rect", {x: box.left, y: 0, width: width - box.left - box.right, height: h, fill: "transparent"});
      area.addEventListener("pointermove", (event) => {
        const left = root.getBoundingClientRect().left;
        const step = x0 + (event.clientX - left - box.left) / (width - box.left - box.right) * (x1 - x0);
        const nearest = (points) => {
          let low = 0, high = points.length - 1;
          while (high - low > 1) { const mid = (low + high) >> 1; if (points[mid][0] < step) low = mid; else high = mid; }
          return Math.abs(points[low][0] - step) < Math.abs(points[high][0] - step) ? points[low] : points[high];
        };
        const main = nearest(series[0].points);
        cross.setAttribute("x1", x(main[0])); cross.setAttribute("x2", x(main[0])); cross.setAttribute("visibility", "visible");
        const rows = [];
        series.forEach((one, i) => {
          const point = i === 0 ? main : nearest(one.points);
          dots[i].setAttribute("cx", x(point[0])); dots[i].setAttribute("cy", y(point[1]));
          dots[i].setAttribute("visibility", "visible");
          rows.push([one.name + (point[0] === main[0] ? "" : ` (step ${digits(point[0], 0)})`), (one.format || format)(point[1])]);
        });
        showTip(event, `Step ${digits(main[0], 0)}`, rows);
      });
      area.addEventListener("pointerleave", () => {
        hideTip();
        for (const node of [cross, ...dots]) node.setAttribute("visibility", "hidden");
      });
      root.append(cross, ...dots, area);
      return root;
    };
  }

  // ------------------------------------------------------------ The run

  const steps = (data.metrics || []).filter((line) => finite(line.step) && "loss" in line);
  const validations = (data.metrics || []).filter((line) => finite(line.validation_loss));
  const column = (f) => steps.map((line) => [line.step, f(line)]).filter((point) => finite(point[1]));
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1];
  const baseline = (data.metrics || []).map((line) => line.byte_frequency_loss).filter(finite).pop();
  const option = (...names) => {
    for (const name of names) {
      const value = name.split(".").reduce((node, key) => (node == null ? node : node[key]), config);
      if (value != null && value !== "") return value;
    }
    return null;
  };
  const groups = data.groups || [];
  const plural = (n, noun) => `${digits(n, 0)} ${noun}${n === 1 ? "" : "s"}`;

  function header() {
    const name = data.name || option("name") || "run";
    document.title = `${name} · fsdp train`;
    at("name").textContent = name;
    at("kicker").textContent = ["fsdp train", option("started", "date")].filter(Boolean).join(" · ");
    const params = option("parameters", "model.parameters", "num_params") || groups.reduce((sum, group) => sum + group.numel, 0);
    const layers = option("model.layers", "layers"), dim = option("model.dim", "dim");
    const sizes = String(option("mesh") || "").match(/\d+/g);
    const ranks = option("ranks", "world_size") || (sizes && sizes.reduce((all, size) => all * Number(size), 1)), backend = option("backend");
    const pieces = [];
    if (params) pieces.push(`${count(params)} parameters` + (layers && dim ? ` in ${plural(layers, "layer")} of ${dim}` : ""));
    if (ranks) pieces.push(plural(ranks, "rank") + (backend ? ` over ${backend}` : "") + (option("mesh") ? ` (${option("mesh")})` : ""));
    if (groups.length) pieces.push(plural(groups.length, "group"));
    const batch = option("batch"), context = option("context");
    if (batch && context) pieces.push(`${batch} × ${context} tokens per step`);
    if (option("seed") != null) pieces.push(`seed ${option("seed")}`);
    at("summary").textContent = pieces.length ? pieces.join(", ") + "." : "";

    const facts = [];
    const fact = (label, value, note) => facts.push(el("div", {}, el("dt", {}, label), el("dd", {}, value), note ? el("div", {class: "note"}, note) : null));
    const losses = column((line) => line.loss).map((point) => point[1]);
    if (losses.length) fact("Loss", digits(mean(losses.slice(-10)), 3), `from ${digits(losses[0], 3)}`);
    if (validations.length) {
      fact("Validation loss", digits(validations.at(-1).validation_loss, 3), finite(baseline) ? `bytes alone: ${digits(baseline, 3)}` : null);
    }
    const speed = column((line) => line.tokens_per_s).map((point) => point[1]);
    if (speed.length) fact("Tokens per second", count(median(speed)), "median step");
    const exposed = column((line) => line.exposed_s / line.seconds).map((point) => point[1]);
    if (exposed.length) fact("Waiting", percent(median(exposed)), "for communication");
    const peaks = steps.map((line) => line.memory && line.memory.peak).filter(finite);
    if (peaks.length) fact("Peak memory", bytes(Math.max(...peaks)), "rank 0");
    const time = steps.reduce((sum, line) => sum + (line.seconds || 0), 0);
    if (time > 0) fact("Time", seconds(time), `${plural(steps.length, "step")}, ${count(steps.reduce((sum, line) => sum + (line.seconds * line.tokens_per_s || 0), 0))} tokens`);
    at("facts").replaceChildren(...facts);
    if (!facts.length) at("facts").remove();
  }

  function training() {
    if (column((line) => line.loss).length === 0) {
      at("training").replaceChildren(el("h2", {}, "Loss"), el("p", {class: "missing"}, "metrics.jsonl has no step with a loss."));
      return;
    }
    at("loss-lede").textContent = "Cross entropy in nats per byte" + (steps.length > 40 ? "; the strong line is a running mean." : ".");
    const items = [{color: css("accent"), name: "training", shape: "thin"}];
    if (validations.length) items.push({color: css("second"), name: "validation, on held-out text", shape: "thin"});
    if (finite(baseline)) items.push({name: "byte frequencies alone", shape: "dashed"});
    legend("loss-legend", items);
    figure("loss", lineChart({
      label: "Training and validation loss by step", height: 300, format: (v) => three(v),
      levels: finite(baseline) ? [{name: "byte frequencies", value: baseline}] : [],
      series: [
        {name: "training", color: css("accent"), smooth: true, points: column((line) => line.loss), format: (v) => digits(v, 4)},
        {name: "validation", color: css("second"), marks: true, format: (v) => digits(v, 4),
          points: validations.map((line) => [line.step, line.validation_loss])}]}));
    const small = (id, label, format, f, more = {}) => {
      const points = column(f);
      if (points.length === 0) return missing(id, "Not recorded.");
      figure(id, lineChart({label, height: 170, format, zero: true,
        series: [{name: label, color: css(more.color || "accent"), smooth: !more.plain, points}], ...more}));
    };
    small("throughput", "tokens/s", (v) => count(v), (line) => line.tokens_per_s);
    small("exposed", "waiting", (v) => percent(v), (line) => line.exposed_s / line.seconds, {color: "waiting", upper: 1, axisFormat: (v) => digits(100 * v, 2) + " %"});
    small("norm", "gradient norm", (v) => three(v), (line) => line.grad_norm);
    small("rate", "learning rate", power, (line) => line.lr, {plain: true});
  }

  // ------------------------------------------------------------ One step

  const kActivities = ["forward", "backward", "optimizer", "sharding", "user", "other"];
  const activityColor = {forward: "forward", backward: "backward", optimizer: "optimizer", sharding: "sharding", user: "user", other: "idle"};
  const activityName = {forward: "forward", backward: "backward", optimizer: "optimizer", sharding: "copies of shards", user: "own ranges", other: "other"};
  const kCollectives = ["all_gather", "reduce_scatter", "all_reduce"];
  const collectiveColor = {all_gather: "all-gather", reduce_scatter: "reduce-scatter", all_reduce: "all-reduce"};
  const spoken = (op) => op.replaceAll("_", "-");

  /** The step of middle length, of those that are not the first: {step, ranks: [{rank, begin, end, slices, ...}]}. */
  function oneStep(events) {
    const whole = events.filter((event) => event.ph === "X" && event.cat === "step");
    const first = Math.min(...whole.map((event) => event.pid));
    const mine = whole.filter((event) => event.pid === first);
    if (mine.length === 0) return null;
    const choice = mine.length > 2 ? mine.slice(1) : mine;
    const step = [...choice].sort((a, b) => a.dur - b.dur)[(choice.length - 1) >> 1].args.step;
    const same = whole.filter((event) => event.args.step === step).sort((a, b) => a.pid - b.pid);
    const begin = Math.min(...same.map((event) => event.ts));
    const end = Math.max(...same.map((event) => event.ts + event.dur));
    const byRank = new Map(same.map((event) => [event.pid, {rank: event.pid, begin: event.ts - begin,
      end: event.ts + event.dur - begin, slices: [], waits: [], collectives: [], memory: []}]));
    let before = new Map(); // the last count of memory before the step
    for (const event of events) {
      const rank = byRank.get(event.pid);
      if (!rank) continue;
      const from = event.ts - begin;
      if (event.ph === "C" && event.name === "memory") {
        if (from < rank.begin) before.set(rank, [rank.begin, event.args]);
        else if (from <= rank.end) rank.memory.push([from, event.args]);
      }
      if (event.ph !== "X" || event.cat === "step" || from + event.dur <= rank.begin || from >= rank.end) continue;
      const slice = {begin: Math.max(from, rank.begin), end: Math.min(from + event.dur, rank.end), name: event.name, cat: event.cat, args: event.args || {}};
      (event.cat === "waiting" ? rank.waits : kActivities.includes(event.cat) ? rank.slices : rank.collectives).push(slice);
    }
    for (const [rank, sample] of before) rank.memory.unshift(sample);
    return {step, length: end - begin, ranks: [...byRank.values()]};
  }

  function lanesOf(collectives) {
    const ends = [];
    for (const each of [...collectives].sort((a, b) => a.begin - b.begin)) {
      let lane = ends.findIndex((end) => end <= each.begin);
      if (lane < 0) lane = ends.length;
      ends[lane] = each.end;
      each.lane = lane;
    }
    return Math.max(1, ends.length);
  }

  function timeline(one) {
    const total = (rank, cat) => rank.slices.filter((slice) => slice.cat === cat).reduce((sum, slice) => sum + slice.end - slice.begin, 0);
    const waited = (rank) => rank.waits.reduce((sum, wait) => sum + wait.end - wait.begin, 0);
    const share = (f) => percent(mean(one.ranks.map((rank) => f(rank) / (rank.end - rank.begin))));
    const used = kActivities.filter((cat) => one.ranks.some((rank) => total(rank, cat) > 0));
    const kinds = kCollectives.filter((kind) => one.ranks.some((rank) => rank.collectives.some((each) => each.cat === kind)));
    const more = one.ranks.some((rank) => rank.collectives.some((each) => !kCollectives.includes(each.cat)));

    at("timeline-title").textContent = `Step ${digits(one.step, 0)}, drawn to scale`;
    at("timeline-lede").textContent = `${ms(one.length)} from left to right. The upper band of a rank is what its own thread ` +
      "does, vermilion where it has to wait. Below it lie the collectives in flight: pale where " +
      "work goes on meanwhile, solid where the rank waits for them.";
    legend("timeline-legend", [
      ...used.map((cat) => ({color: css(activityColor[cat]), name: activityName[cat], value: share((rank) => total(rank, cat))})),
      {color: css("waiting"), name: "waiting", value: share(waited)},
      {}, ...kinds.map((kind) => ({color: css(collectiveColor[kind]), name: spoken(kind)})),
      ...(more ? [{color: css("collective"), name: "other collectives"}] : [])]);

    const rows = [...kinds, ...(more ? ["more"] : [])];
    const of = (rank, row) => rank.collectives.filter((each) => row === "more" ? !kCollectives.includes(each.cat) : each.cat === row);
    const depth = {};
    for (const row of rows) depth[row] = Math.min(3, Math.max(...one.ranks.map((rank) => lanesOf(of(rank, row)))));
    let view = [0, one.length];
    let most = 8; // ranks that are shown

    const draw = (width) => {
      const narrow = width < 560;
      const left = narrow ? 0 : 58, right = 1, band = 22, thin = 6, gap = 2, between = narrow ? 16 : 20;
      const head = narrow ? 18 : 0;
      const shown = one.ranks.slice(0, most);
      const height = head + band + rows.reduce((sum, row) => sum + gap + depth[row] * (thin + 1), 0);
      const h = 8 + shown.length * (height + between) + 20;
      const x = (t) => left + (t - view[0]) / (view[1] - view[0]) * (width - left - right);
      const root = svg("svg", {viewBox: `0 0 ${width} ${h}`, height: h, role: "img", "aria-label": "Timeline of one step on every rank"});
      const clip = svg("clipPath", {id: "plot"});
      clip.append(svg("rect", {x: left, y: 0, width: width - left - right, height: h}));
      root.append(clip);
      const bottom = h - 22;
      const times = ticks(view[0], view[1], width / 120);
      axisTexts(times, milliseconds).forEach((text, i) => {
        const here = x(times[i]);
        root.append(svg("line", {class: "grid", x1: here, x2: here, y1: 0, y2: bottom}));
        const anchor = here < left + 20 ? "start" : here > width - 20 ? "end" : "middle";
        root.append(svg("text", {x: here, y: h - 5, "text-anchor": anchor}, text));
      });
      const plot = svg("g", {"clip-path": "url(#plot)"});
      const boxes = [];
      const bar = (each, y, size, color, opacity, title, rowsOf) => {
        if (each.end < view[0] || each.begin > view[1]) return;
        const wide = Math.max(x(each.end) - x(each.begin), 0.6);
        // A hairline of paper between neighbours, where there is room for one.
        const node = svg("rect", {x: x(each.begin).toFixed(2), y, width: (wide > 3 ? wide - 0.7 : wide).toFixed(2), height: size,
          fill: css(color), rx: wide > 6 ? 1.5 : 0});
        if (opacity !== 1) node.style.opacity = opacity;
        node.tip = () => [title, rowsOf()];
        plot.append(node);
        boxes.push(node);
      };
      shown.forEach((rank, i) => {
        const top = 4 + i * (height + between);
        if (narrow) {
          root.append(svg("text", {class: "strong", x: 0, y: top + 11}, `rank ${rank.rank}`));
          root.append(svg("text", {x: width, y: top + 11, "text-anchor": "end"}, `${percent(waited(rank) / (rank.end - rank.begin))} waiting`));
        } else {
          root.append(svg("text", {class: "strong", x: 0, y: top + 15}, `rank ${rank.rank}`));
        }
        let y = top + head;
        for (const slice of rank.slices) {
          bar(slice, y, band, activityColor[slice.cat], 1, `${activityName[slice.cat]} ${slice.cat === "other" ? "" : slice.name}`.trim(), () => [
            ["rank", String(rank.rank)], ["from", ms(slice.begin)], ["length", ms(slice.end - slice.begin)]]);
        }
        for (const wait of rank.waits) {
          bar(wait, y, band, "waiting", 1, `waiting for ${spoken(wait.name)}`, () => [
            ["rank", String(rank.rank)], ["from", ms(wait.begin)], ["length", ms(wait.end - wait.begin)]]);
        }
        y += band;
        for (const row of rows) {
          y += gap;
          for (const each of of(rank, row)) {
            if (each.lane >= depth[row]) continue;
            const color = collectiveColor[row] || "collective";
            const place = y + each.lane * (thin + 1);
            const about = () => [["rank", String(rank.rank)], ["bytes", bytes(each.args.bytes || 0)], ["group", each.args.group || ""],
              ["from", ms(each.begin)], ["in flight", ms(each.end - each.begin)], ["waited for", ms(each.args.waited_us || 0)]];
            bar(each, place, thin, color, css("pale"), spoken(each.name), about);
            for (const wait of rank.waits) {
              if (wait.name === each.name && wait.begin >= each.begin && wait.end <= each.end + 1) bar(wait, place, thin, color, 1, spoken(each.name), about);
            }
          }
          y += depth[row] * (thin + 1);
        }
      });
      root.append(plot);
      // Hover, and zoom by dragging.
      const choice = svg("rect", {y: 0, height: bottom, fill: css("accent"), opacity: 0.14, visibility: "hidden"});
      root.append(choice);
      let from = null;
      const time = (event) => view[0] + (event.clientX - root.getBoundingClientRect().left - left) / (width - left - right) * (view[1] - view[0]);
      root.addEventListener("pointerdown", (event) => {
        if (event.pointerType === "mouse" && event.button === 0) { from = event.clientX; event.preventDefault(); }
      });
      root.addEventListener("pointermove", (event) => {
        if (from != null && Math.abs(event.clientX - from) > 3) {
          hideTip();
          const base = root.getBoundingClientRect().left;
          choice.setAttribute("x", Math.min(from, event.clientX) - base);
          choice.setAttribute("width", Math.abs(event.clientX - from));
          choice.setAttribute("visibility", "visible");
        } else if (event.target.tip) {
          showTip(event, ...event.target.tip());
        } else {
          hideTip();
        }
      });
      const finish = (event) => {
        if (from != null && Math.abs(event.clientX - from) > 6) {
          const a = time({clientX: from}), b = time(event);
          const next = [Math.max(0, Math.min(a, b)), Math.min(one.length, Math.max(a, b))];
          if (next[1] - next[0] > 1) { view = next; from = null; tools(); redraw(); return; }
        }
        from = null;
        choice.setAttribute("visibility", "hidden");
      };
      root.addEventListener("pointerup", finish);
      root.addEventListener("pointerleave", (event) => { hideTip(); if (from != null) finish(event); });
      root.addEventListener("dblclick", () => { view = [0, one.length]; tools(); redraw(); });
      return root;
    };
    let redraw = () => {};
    function tools() {
      const zoomed = view[1] - view[0] < one.length;
      const whole = el("button", {type: "button"}, "Whole step");
      whole.onclick = () => { view = [0, one.length]; tools(); redraw(); };
      const all = el("button", {type: "button"}, `Show all ${one.ranks.length} ranks`);
      all.onclick = () => { most = Infinity; tools(); redraw(); };
      at("timeline-tools").replaceChildren(
        ...(zoomed ? [whole, el("span", {}, `${ms(view[0])} to ${ms(view[1])}`)]
                   : matchMedia("(pointer: fine)").matches ? [el("span", {}, "Drag across the picture to zoom in.")] : []),
        ...(one.ranks.length > most ? [all] : []));
    }
    tools();
    redraw = figure("timeline", draw);

    const table = el("table", {}, el("thead", {}, el("tr", {}, ...["", "step", ...used.map((cat) => activityName[cat]), "waiting"].map((name) =>
      el("th", ["step", "copies of shards", "other", "own ranges"].includes(name) ? {class: "optional"} : {}, name)))));
    const body = el("tbody");
    for (const rank of one.ranks.slice(0, 16)) {
      body.append(el("tr", {}, el("td", {}, `rank ${rank.rank}`), el("td", {class: "optional"}, ms(rank.end - rank.begin)),
        ...used.map((cat) => el("td", ["sharding", "other", "user"].includes(cat) ? {class: "optional"} : {}, ms(total(rank, cat)))),
        el("td", {}, ms(waited(rank)))));
    }
    table.append(body);
    at("times").replaceChildren(table);
  }

  // ------------------------------------------------------------ Memory

  const kCategories = ["shards", "gradients", "other", "gathered", "communication"]; // from below: what stays, first
  const categoryName = {shards: "shards", gathered: "gathered parameters", gradients: "gradients",
    communication: "communication buffers", other: "activations, optimizer, rest"};

  function memory(one) {
    const ranks = one.ranks.filter((rank) => rank.memory.length > 1);
    if (ranks.length === 0) {
      at("memory-section").remove();
      return;
    }
    let chosen = ranks[0];
    const sum = (sample) => kCategories.reduce((all, name) => all + (sample[name] || 0), 0);
    const highest = (f) => Math.max(...chosen.memory.map(([, sample]) => f(sample)));
    const top = Math.max(...ranks.flatMap((rank) => rank.memory.map(([, sample]) => sum(sample)))) * 1.06;
    const describe = () => {
      at("memory-lede").textContent = `Bytes on rank ${chosen.rank} by category, counted where phases begin and end. Highest: ${bytes(highest(sum))}.`;
      legend("memory-legend", [...kCategories].reverse().map((name) => ({color: css(name), name: categoryName[name], value: bytes(highest((sample) => sample[name] || 0))})));
    };
    const redraw = figure("memory", (width) => {
      const narrow = width < 480;
      const box = {left: narrow ? 52 : 58, right: 1, top: 8, bottom: 24}, h = narrow ? 220 : 270;
      const x = (t) => box.left + t / one.length * (width - box.left - box.right);
      const y = (v) => h - box.bottom - v / top * (h - box.top - box.bottom);
      const root = svg("svg", {viewBox: `0 0 ${width} ${h}`, height: h, role: "img", "aria-label": "Memory by category over one step"});
      const levels = byteTicks(top, 4);
      axisTexts(levels, (v) => bytes(v).replace(/\.0+(?= )/, "")).forEach((text, i) => {
        root.append(svg("line", {class: "grid", x1: box.left, x2: width - box.right, y1: y(levels[i]), y2: y(levels[i])}));
        root.append(svg("text", {x: box.left - 8, y: y(levels[i]) + 4, "text-anchor": "end"}, text));
      });
      // A step function: a count holds until the next.
      const base = chosen.memory.map(() => 0);
      for (const name of kCategories) {
        const low = [], high = [];
        chosen.memory.forEach(([t, sample], i) => {
          const until = i + 1 < chosen.memory.length ? chosen.memory[i + 1][0] : chosen.end;
          const value = base[i] + (sample[name] || 0);
          low.push([t, base[i]], [until, base[i]]);
          high.push([t, value], [until, value]);
          base[i] = value;
        });
        root.append(svg("path", {d: path([...high, ...low.reverse()], x, y) + "Z", fill: css(name), opacity: 0.88, "data-category": name}));
      }
      root.append(svg("line", {class: "axis", x1: box.left, x2: width - box.right, y1: h - box.bottom, y2: h - box.bottom}));
      const times = ticks(0, one.length, width / 120);
      axisTexts(times, milliseconds).forEach((text, i) => {
        const anchor = x(times[i]) > width - 20 ? "end" : "middle";
        root.append(svg("text", {x: x(times[i]), y: h - 6, "text-anchor": anchor}, text));
      });
      const cross = svg("line", {class: "cross", y1: box.top, y2: h - box.bottom, visibility: "hidden"});
      const area = svg("rect", {x: box.left, y: 0, width: width - box.left - box.right, height: h, fill: "transparent"});
      area.addEventListener("pointermove", (event) => {
        const t = (event.clientX - root.getBoundingClientRect().left - box.left) / (width - box.left - box.right) * one.length;
        const sample = chosen.memory.filter(([when]) => when <= t).pop() || chosen.memory[0];
        const doing = chosen.slices.find((slice) => slice.begin <= t && t < slice.end);
        cross.setAttribute("x1", x(t)); cross.setAttribute("x2", x(t)); cross.setAttribute("visibility", "visible");
        showTip(event, ms(t) + (doing && doing.cat !== "other" ? ` · ${activityName[doing.cat]} ${doing.name}` : ""),
          [...kCategories].reverse().map((name) => [categoryName[name], bytes(sample[1][name] || 0)]).concat([["all", bytes(sum(sample[1]))]]));
      });
      area.addEventListener("pointerleave", () => { hideTip(); cross.setAttribute("visibility", "hidden"); });
      root.append(cross, area);
      return root;
    });
    const buttons = ranks.slice(0, 32).map((rank) => {
      const button = el("button", {type: "button", "aria-pressed": String(rank === chosen)}, `rank ${rank.rank}`);
      button.onclick = () => {
        chosen = rank;
        buttons.forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
        describe();
        redraw();
      };
      return button;
    });
    if (buttons.length > 1) at("memory-tools").replaceChildren(...buttons);
    else at("memory-tools").remove();
    describe();
  }

  // ------------------------------------------------------------ Groups and options

  function groupTable() {
    if (groups.length === 0) {
      at("groups-section").remove();
      return;
    }
    // Equal neighbours (the layers of a model) become one row.
    const same = (a, b) => ["numel", "dtype", "shard_bytes", "gathered_bytes", "padding_bytes"].every((key) => a[key] === b[key]);
    const runs = [];
    for (const group of groups) {
      if (runs.length && same(runs.at(-1)[0], group)) runs.at(-1).push(group);
      else runs.push([group]);
    }
    const shown = runs.flatMap((run) => (run.length > 3 ? [run] : run.map((group) => [group])));
    const head = ["Module", "Parameters", "Shard", "Gathered", "Padding"];
    const table = el("table", {}, el("thead", {}, el("tr", {}, ...head.map((name, i) => el("th", {scope: "col"}, name)))));
    const body = el("tbody");
    for (const run of shown) {
      const group = run[0];
      const name = (one) => one.name || "(root)";
      body.append(el("tr", {},
        el("td", {}, el("code", {}, run.length > 1 ? `${name(group)} … ${name(run.at(-1))}` : name(group)),
          ...(run.length > 1 ? [" ", el("small", {}, `${run.length} alike, each`)] : [])),
        el("td", {}, count(group.numel), group.dtype ? el("small", {class: "optional"}, " " + String(group.dtype).toLowerCase()) : null),
        el("td", {}, bytes(group.shard_bytes)), el("td", {}, bytes(group.gathered_bytes)),
        el("td", {}, group.padding_bytes ? bytes(group.padding_bytes) : "–",
          group.padding_bytes ? el("small", {class: "optional"}, ` ${percent(group.padding_bytes / group.gathered_bytes)}`) : null)));
    }
    const all = (key) => groups.reduce((sum, group) => sum + (group[key] || 0), 0);
    table.append(body, el("tfoot", {}, el("tr", {}, el("td", {}, plural(groups.length, "group")), el("td", {}, count(all("numel"))),
      el("td", {}, bytes(all("shard_bytes"))), el("td", {}, bytes(all("gathered_bytes"))),
      el("td", {}, all("padding_bytes") ? bytes(all("padding_bytes")) : "–"))));
    at("groups").replaceChildren(table);
  }

  function options() {
    const rows = [];
    const walk = (node, prefix) => {
      for (const [key, value] of Object.entries(node)) {
        if (value && typeof value === "object" && !Array.isArray(value)) walk(value, prefix + key + ".");
        else rows.push(el("div", {}, el("dt", {}, el("code", {}, prefix + key)), el("dd", {class: "mono"}, Array.isArray(value) ? value.join(", ") : String(value))));
      }
    };
    walk(config, "");
    if (rows.length) at("config").replaceChildren(...rows);
    else at("config-section").remove();
  }

  header();
  training();
  const one = data.trace ? oneStep(data.trace) : null;
  if (one) {
    timeline(one);
    memory(one);
  } else {
    at("timeline-section").replaceChildren(el("h2", {}, "One step, drawn to scale"),
      el("p", {class: "missing"}, "The run has no trace.json, or no whole step in it."));
    at("memory-section").remove();
  }
  groupTable();
  options();
  at("footer").textContent = `Written by fsdp${data.version ? " " + data.version : ""}.` + (one ? " The whole trace.json opens in ui.perfetto.dev." : "");
  document.documentElement.dataset.ready = "yes";
})();
