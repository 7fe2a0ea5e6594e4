// What every figure of the page needs: elements, numbers, tooltip, line charts.

const data = JSON.parse(document.getElementById('data').textContent);
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
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
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
const figures = [];
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
  figures.push(redraw);
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
function missing(id, text) {
  at(id).replaceChildren(el('p', {class: 'missing'}, text));
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
    const root =
        svg('svg', {viewBox: `0 0 ${width} ${h}`, height: h, role: 'img', 'aria-label': label});
    const levelsOfGrid = ticks(lo, hi, h < 190 ? 4 : 5);
    const texts = axisTexts(levelsOfGrid, axisFormat);
    levelsOfGrid.forEach((value, i) => {
      root.append(
          svg('line',
              {class: 'grid', x1: box.left, x2: width - box.right, y1: y(value), y2: y(value)}));
      root.append(svg('text', {x: box.left - 8, y: y(value) + 4, 'text-anchor': 'end'}, texts[i]));
    });
    root.append(svg('line', {
      class: 'axis',
      x1: box.left,
      x2: width - box.right,
      y1: h - box.bottom,
      y2: h - box.bottom
    }));
    for (const value of ticks(x0, x1, width / 95).filter(Number.isInteger)) {
      root.append(svg('text', {x: x(value), y: h - 6, 'text-anchor': 'middle'}, digits(value, 0)));
    }
    for (const level of levels) {
      root.append(svg('line', {
        stroke: css('faint'),
        'stroke-dasharray': '5 4',
        x1: box.left,
        x2: width - box.right,
        y1: y(level.value),
        y2: y(level.value)
      }));
    }
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
      if ((one.marks && one.points.length <= 40) || one.points.length === 1) {
        for (const [a, b] of one.points) {
          root.append(svg('circle', {
            cx: x(a),
            cy: y(b),
            r: 3.5,
            fill: one.color,
            stroke: css('paper'),
            'stroke-width': 1.5
          }));
        }
      }
    }
    const cross =
        svg('line', {class: 'cross', y1: box.top, y2: h - box.bottom, visibility: 'hidden'});
    const dots = series.map((one) => svg('circle', {
                              r: 4,
                              fill: one.color,
                              stroke: css('paper'),
                              'stroke-width': 1.5,
                              visibility: 'hidden'
                            }));
    const area = svg(
        'rect',
        {x: box.left, y: 0, width: width - box.left - box.right, height: h, fill: 'transparent'});
    area.addEventListener('pointermove', (event) => {
      const left = root.getBoundingClientRect().left;
      const step =
          x0 + (event.clientX - left - box.left) / (width - box.left - box.right) * (x1 - x0);
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
      cross.setAttribute('x1', x(main[0]));
      cross.setAttribute('x2', x(main[0]));
      cross.setAttribute('visibility', 'visible');
      const rows = [];
      series.forEach((one, i) => {
        const point = i === 0 ? main : nearest(one.points);
        dots[i].setAttribute('cx', x(point[0]));
        dots[i].setAttribute('cy', y(point[1]));
        dots[i].setAttribute('visibility', 'visible');
        rows.push([
          one.name + (point[0] === main[0] ? '' : ` (step ${digits(point[0], 0)})`),
          (one.format || format)(point[1])
        ]);
      });
      showTip(event, `Step ${digits(main[0], 0)}`, rows);
    });
    area.addEventListener('pointerleave', () => {
      hideTip();
      for (const node of [cross, ...dots]) node.setAttribute('visibility', 'hidden');
    });
    root.append(cross, ...dots, area);
    return root;
  };
}
