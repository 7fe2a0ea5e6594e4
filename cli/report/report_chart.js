// What every figure of the page needs: elements, numbers, tooltip, line charts.

const data = JSON.parse(document.getElementById('data').textContent);
const config = data.config || {};
const at = (id) => document.getElementById(id);
const css = (name) => `var(--${name})`;

// ------------------------------------------------------------ Elements and numbers

function set(node, attributes) {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}
function el(tag, attributes = {}, ...children) {
  const node = set(document.createElement(tag), attributes);
  node.append(...children.filter((child) => child != null));
  return node;
}
function svg(tag, attributes, text) {
  const node = set(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes);
  if (text != null) node.textContent = text;
  return node;
}
const finite = (x) => typeof x === 'number' && Number.isFinite(x);
const digits = (x, n) =>
    x.toLocaleString('en-US', {maximumFractionDigits: n, minimumFractionDigits: n});
const three = (x) => {
  const size = Math.abs(x);
  return digits(x, size >= 100 || x === 0 ? 0 : size >= 10 ? 1 : 2);
};
function scaled(x, base, units) {
  let unit = 0;
  while (Math.abs(x) >= base && unit + 1 < units.length) {
    x /= base;
    ++unit;
  }
  return (unit === 0 ? digits(x, 0) : three(x)) + units[unit];
}
const bytes = (x) => scaled(x, 1024, [' B', ' KiB', ' MiB', ' GiB', ' TiB']);
const count = (x) => scaled(x, 1000, ['', 'k', 'M', 'B', 'T']);
const operations = (x) => scaled(x, 1000, [' ', ' k', ' M', ' G', ' T', ' P']) + 'FLOP/s';
const ms = (us) =>
    (us >= 1e6     ? three(us / 1e6) + ' s' :
         us >= 1e3 ? three(us / 1e3) + ' ms' :
                     three(us) + ' µs');
const milliseconds = (us) => digits(us / 1e3, 4) + ' ms';
const percent = (x) => digits(100 * x, x !== 0 && Math.abs(x) < 0.1 ? 1 : 0) + ' %';
function seconds(s) {
  if (s < 100) return three(s) + ' s';
  const m = Math.floor(s / 60);
  return m < 100 ? `${m} min ${Math.round(s % 60)} s` : `${Math.floor(m / 60)} h ${m % 60} min`;
}
const power = (x) =>
    (x === 0 ? '0' : x.toExponential(1).replace('.0e', 'e').replace('e-', 'e−').replace('e+', 'e'));

/** Round values that cover lo to hi, about `about` of them. */
function ticks(lo, hi, about) {
  if (!(hi > lo)) return [lo];
  const rough = (hi - lo) / about;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
  const result = [];
  for (let i = Math.ceil(lo / step - 1e-9); i * step <= hi + step * 1e-9; ++i)
    result.push(i * step || 0);  // no -0
  return result;
}
/** Texts for an axis, without the zeros at the end that all have. */
function axisTexts(values, format) {
  let texts = values.map((value) => (value === 0 ? '0' : format(value)));
  const tail = /(\.\d*?)0(?=\D*$)/;
  const others = () => texts.filter((text) => text !== '0');
  while (others().length && others().every((text) => tail.test(text))) {
    texts = texts.map((text) => text.replace(tail, '$1').replace(/\.(?=\D*$)/, ''));
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

const tip = at('tip');
function showTip(event, title, rows) {
  tip.replaceChildren(
      el('b', {}, title),
      ...rows.map(([name, value]) => el('div', {}, el('span', {}, name), value)));
  tip.style.display = 'block';
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 :
                                                          event.clientX + 14;
  tip.style.left = Math.max(6, x) + 'px';
  tip.style.top = Math.max(6, Math.min(event.clientY + 14, innerHeight - box.height - 6)) + 'px';
}
const hideTip = () => {
  tip.style.display = 'none';
};
addEventListener('scroll', hideTip, {passive: true});

// Figures are drawn for the width they have, and again when that changes.
function figure(id, draw) {
  const node = at(id);
  let drawn = 0;
  const redraw = () => {
    const width = Math.floor(node.clientWidth);
    if (width > 0) {
      drawn = width;
      node.replaceChildren(draw(width));
    }
  };
  new ResizeObserver(() => {
    if (Math.floor(node.clientWidth) !== drawn) redraw();
  }).observe(node);
  redraw();
  return redraw;
}
function legend(id, items) {
  at(id).replaceChildren(...items.map(({color, name, value, shape}) => {
    if (!name) return el('li', {class: 'break'});
    const swatch = el('i', {class: 'swatch ' + (shape || '')});
    if (shape !== 'dashed') swatch.style.background = color;
    return el('li', {}, swatch, name, value ? el('b', {}, value) : null);
  }));
}
function missing(id, text, title) {
  at(id).replaceChildren(
      ...(title ? [el('h2', {}, title)] : []), el('p', {class: 'missing'}, text));
}

// ------------------------------------------------------------ Parts of a figure

const drawing = (width, height, label) =>
    svg('svg', {viewBox: `0 0 ${width} ${height}`, height, role: 'img', 'aria-label': label});
const across = (x1, x2, y, attributes) => svg('line', {x1, x2, y1: y, y2: y, ...attributes});
const upright = (x, y1, y2, attributes) => svg('line', {x1: x, x2: x, y1, y2, ...attributes});

/** Lines at the values of the vertical axis, and their texts. */
function gridOf(box, width, y, values, texts) {
  return values.flatMap((value, i) => [
    across(box.left, width - box.right, y(value), {class: 'grid'}),
    svg('text', {x: box.left - 8, y: y(value) + 4, 'text-anchor': 'end'}, texts[i])
  ]);
}
/**
 * A line that follows the pointer, and further `marks`, over a plot. `showTip` gets the position
 * of the pointer, from 0 to 1, and returns the x of the line.
 */
function crosshair(root, box, width, h, marks, showTip) {
  const inside = width - box.left - box.right;
  const cross = svg('line', {class: 'cross', y1: box.top, y2: h - box.bottom});
  const area = svg('rect', {x: box.left, y: 0, width: inside, height: h, fill: 'transparent'});
  const show = (visibility) => [cross, ...marks].forEach((node) => set(node, {visibility}));
  area.addEventListener('pointermove', (event) => {
    const left = root.getBoundingClientRect().left + box.left;
    const x = showTip(event, (event.clientX - left) / inside);
    set(cross, {x1: x, x2: x});
    show('visible');
  });
  area.addEventListener('pointerleave', () => {
    hideTip();
    show('hidden');
  });
  show('hidden');
  root.append(cross, ...marks, area);
}

// ------------------------------------------------------------ Line charts

/** Means over as many neighbours as share a pixel or two: long runs stay light. */
function thinned(points, most) {
  if (points.length <= most) return points;
  const result = [];
  for (let i = 0; i < most; ++i) {
    const part = points.slice(
        Math.floor(i * points.length / most), Math.floor((i + 1) * points.length / most));
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
const path = (points, x, y) =>
    points.map(([a, b], i) => (i ? 'L' : 'M') + x(a).toFixed(1) + ' ' + y(b).toFixed(1)).join('');

const dot = (one, center) =>
    svg('circle', {fill: one.color, stroke: css('paper'), 'stroke-width': 1.5, ...center});

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
    const ys = series.flatMap((one) => one.points.map((point) => point[1]))
                   .concat(levels.map((level) => level.value));
    const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    // Single spikes must not flatten all the rest.
    const sorted = [...ys].sort((a, b) => a - b);
    let hi = sorted[sorted.length - 1];
    const usual = sorted[Math.floor(0.98 * (sorted.length - 1))];
    if (sorted.length > 50 && usual > 0 && hi > 3 * usual) hi = 1.5 * usual;
    let lo = zero ? Math.min(0, sorted[0]) : sorted[0];
    const room = (hi - lo || Math.abs(hi) || 1) * 0.06;
    hi += room;
    if (!zero) lo -= room;
    if (upper != null) hi = Math.min(Math.max(hi, lo + 1e-9), upper);
    const x = (v) =>
        box.left + (x1 > x0 ? (v - x0) / (x1 - x0) : 0.5) * (width - box.left - box.right);
    const y = (v) =>
        h - box.bottom - (Math.min(v, hi) - lo) / (hi - lo) * (h - box.top - box.bottom);
    const root = drawing(width, h, label);
    const values = ticks(lo, hi, h < 190 ? 4 : 5);
    root.append(
        ...gridOf(box, width, y, values, axisTexts(values, axisFormat)),
        across(box.left, width - box.right, h - box.bottom, {class: 'axis'}));
    for (const value of ticks(x0, x1, width / 95).filter(Number.isInteger)) {
      root.append(svg('text', {x: x(value), y: h - 6, 'text-anchor': 'middle'}, digits(value, 0)));
    }
    const dashed = {stroke: css('faint'), 'stroke-dasharray': '5 4'};
    for (const level of levels)
      root.append(across(box.left, width - box.right, y(level.value), dashed));
    for (const one of series) {
      const shown = thinned(one.points, Math.floor(width * 1.5));
      const stroke =
          {fill: 'none', stroke: one.color, 'stroke-linejoin': 'round', 'stroke-linecap': 'round'};
      if (one.smooth && one.points.length > 40) {
        root.append(
            svg('path', {...stroke, d: path(shown, x, y), 'stroke-width': 1, opacity: 0.32}));
        root.append(svg('path', {...stroke, d: path(smoothed(shown), x, y), 'stroke-width': 2}));
      } else {
        root.append(svg('path', {...stroke, d: path(shown, x, y), 'stroke-width': 1.75}));
      }
      if ((one.marks && one.points.length <= 40) || one.points.length === 1)
        root.append(...one.points.map(([a, b]) => dot(one, {cx: x(a), cy: y(b), r: 3.5})));
    }
    const dots = series.map((one) => dot(one, {r: 4}));
    crosshair(root, box, width, h, dots, (event, share) => {
      const step = x0 + share * (x1 - x0);
      const nearest = (points) => {
        let low = 0, high = points.length - 1;
        while (high - low > 1) {
          const mid = (low + high) >> 1;
          if (points[mid][0] < step)
            low = mid;
          else
            high = mid;
        }
        return Math.abs(points[low][0] - step) < Math.abs(points[high][0] - step) ? points[low] :
                                                                                    points[high];
      };
      const main = nearest(series[0].points);
      const rows = series.map((one, i) => {
        const point = nearest(one.points);
        set(dots[i], {cx: x(point[0]), cy: y(point[1])});
        return [
          one.name + (point[0] === main[0] ? '' : ` (step ${digits(point[0], 0)})`),
          (one.format || format)(point[1])
        ];
      });
      showTip(event, `Step ${digits(main[0], 0)}`, rows);
      return x(main[0]);
    });
    return root;
  };
}
