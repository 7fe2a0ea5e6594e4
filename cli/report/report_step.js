// The timeline and the memory of one step of the trace.

// ------------------------------------------------------------ One step

// The names of categories in the trace are names of colours, too, but for some.
const kActivities = ['forward', 'backward', 'optimizer', 'sharding', 'user', 'other'];
const activityColor = (cat) => (cat === 'other' ? 'idle' : cat);
const activityName = (cat) => ({sharding: 'copies of shards', user: 'own ranges'}[cat] || cat);
const kCollectives = ['all_gather', 'reduce_scatter', 'all_reduce'];
const spoken = (op) => op.replaceAll('_', '-');

/** The step that the events are of: {step, ranks: [{rank, begin, end, slices, ...}]}. */
function oneStep(events) {
  const same = events.filter((event) => event.cat === 'step').sort((a, b) => a.pid - b.pid);
  const begin = Math.min(...same.map((event) => event.ts));
  const end = Math.max(...same.map((event) => event.ts + event.dur));
  const byRank = new Map(same.map((event) => [event.pid, {
                                    rank: event.pid,
                                    begin: event.ts - begin,
                                    end: event.ts + event.dur - begin,
                                    slices: [],
                                    waits: [],
                                    collectives: [],
                                    memory: []
                                  }]));
  const before = new Map();  // the last count of memory before the step
  for (const event of events) {
    const rank = byRank.get(event.pid);
    if (!rank) continue;
    const from = event.ts - begin;
    if (event.ph === 'C' && event.name === 'memory') {
      if (from < rank.begin)
        before.set(rank, [rank.begin, event.args]);
      else if (from <= rank.end)
        rank.memory.push([from, event.args]);
    }
    if (event.ph !== 'X' || event.cat === 'step' || from + event.dur <= rank.begin ||
        from >= rank.end)
      continue;
    const list = event.cat === 'waiting' ? 'waits' :
        kActivities.includes(event.cat)  ? 'slices' :
                                           'collectives';
    rank[list].push({
      begin: Math.max(from, rank.begin),
      end: Math.min(from + event.dur, rank.end),
      name: event.name,
      cat: event.cat,
      args: event.args || {}
    });
  }
  for (const [rank, sample] of before) rank.memory.unshift(sample);
  return {step: same[0].args.step, length: end - begin, ranks: [...byRank.values()]};
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
  const lengths = (slices) => slices.reduce((sum, slice) => sum + slice.end - slice.begin, 0);
  const total = (rank, cat) => lengths(rank.slices.filter((slice) => slice.cat === cat));
  const waited = (rank) => lengths(rank.waits);
  const share = (f) => percent(mean(one.ranks.map((rank) => f(rank) / (rank.end - rank.begin))));
  const used = kActivities.filter((cat) => one.ranks.some((rank) => total(rank, cat) > 0));
  const of = (rank, row) => rank.collectives.filter(
      (each) => row === 'more' ? !kCollectives.includes(each.cat) : each.cat === row);
  const rows = [...kCollectives, 'more'].filter(
      (row) => one.ranks.some((rank) => of(rank, row).length > 0));
  const rowColor = (row) => (row === 'more' ? 'collective' : spoken(row));

  at('timeline-title').textContent = `Step ${digits(one.step, 0)}, drawn to scale`;
  at('timeline-lede').textContent =
      `${ms(one.length)} from left to right. The upper band of a rank is what its own thread ` +
      'does, vermilion where it has to wait. Below it lie the collectives in flight: pale where ' +
      'work goes on meanwhile, solid where the rank waits for them.';
  legend('timeline-legend', [
    ...used.map((cat) => ({
                  color: css(activityColor(cat)),
                  name: activityName(cat),
                  value: share((rank) => total(rank, cat))
                })),
    {color: css('waiting'), name: 'waiting', value: share(waited)}, {},
    ...rows.map(
        (row) =>
            ({color: css(rowColor(row)), name: row === 'more' ? 'other collectives' : spoken(row)}))
  ]);

  const depth = {};
  for (const row of rows)
    depth[row] = Math.min(3, Math.max(...one.ranks.map((rank) => lanesOf(of(rank, row)))));
  let view = [0, one.length];
  let most = 8;  // ranks that are shown

  const draw = (width) => {
    const narrow = width < 560;
    const left = narrow ? 0 : 58, right = 1, band = 22, thin = 6, gap = 2,
          between = narrow ? 16 : 20;
    const head = narrow ? 18 : 0;
    const shown = one.ranks.slice(0, most);
    const height = head + band + rows.reduce((sum, row) => sum + gap + depth[row] * (thin + 1), 0);
    const h = 8 + shown.length * (height + between) + 20;
    const x = (t) => left + (t - view[0]) / (view[1] - view[0]) * (width - left - right);
    const root = drawing(width, h, 'Timeline of one step on every rank');
    const clip = svg('clipPath', {id: 'plot'});
    clip.append(svg('rect', {x: left, y: 0, width: width - left - right, height: h}));
    root.append(clip);
    const bottom = h - 22;
    const times = ticks(view[0], view[1], width / 120);
    axisTexts(times, milliseconds).forEach((text, i) => {
      const here = x(times[i]);
      root.append(upright(here, 0, bottom, {class: 'grid'}));
      const anchor = here < left + 20 ? 'start' : here > width - 20 ? 'end' : 'middle';
      root.append(svg('text', {x: here, y: h - 5, 'text-anchor': anchor}, text));
    });
    const plot = svg('g', {'clip-path': 'url(#plot)'});
    const bar = (each, y, size, color, opacity, title, about) => {
      if (each.end < view[0] || each.begin > view[1]) return;
      const wide = Math.max(x(each.end) - x(each.begin), 0.6);
      // A hairline of paper between neighbours, where there is room for one.
      const node = svg('rect', {
        x: x(each.begin).toFixed(2),
        y,
        width: (wide > 3 ? wide - 0.7 : wide).toFixed(2),
        height: size,
        fill: css(color),
        rx: wide > 6 ? 1.5 : 0
      });
      if (opacity !== 1) node.style.opacity = opacity;
      node.tip = () => [title, about()];
      plot.append(node);
    };
    shown.forEach((rank, i) => {
      const top = 4 + i * (height + between);
      if (narrow) {
        root.append(svg('text', {class: 'strong', x: 0, y: top + 11}, `rank ${rank.rank}`));
        root.append(
            svg('text', {x: width, y: top + 11, 'text-anchor': 'end'},
                `${percent(waited(rank) / (rank.end - rank.begin))} waiting`));
      } else {
        root.append(svg('text', {class: 'strong', x: 0, y: top + 15}, `rank ${rank.rank}`));
      }
      let y = top + head;
      const inBand = (each, color, title) => bar(
          each, y, band, color, 1, title,
          () => [
              ['rank', String(rank.rank)], ['from', ms(each.begin)],
              ['length', ms(each.end - each.begin)]]);
      for (const slice of rank.slices) {
        const name = slice.cat === 'other' ? '' : ' ' + slice.name;
        inBand(slice, activityColor(slice.cat), activityName(slice.cat) + name);
      }
      for (const wait of rank.waits) inBand(wait, 'waiting', `waiting for ${spoken(wait.name)}`);
      y += band;
      for (const row of rows) {
        y += gap;
        for (const each of of (rank, row)) {
          if (each.lane >= depth[row]) continue;
          const color = rowColor(row);
          const top = y + each.lane * (thin + 1);
          const about = () => [
              ['rank', String(rank.rank)], ['bytes', bytes(each.args.bytes || 0)],
              ['group', each.args.group || ''], ['from', ms(each.begin)],
              ['in flight', ms(each.end - each.begin)],
              ['waited for', ms(each.args.waited_us || 0)]];
          bar(each, top, thin, color, css('pale'), spoken(each.name), about);
          for (const wait of rank.waits) {
            if (wait.name === each.name && wait.begin >= each.begin && wait.end <= each.end + 1)
              bar(wait, top, thin, color, 1, spoken(each.name), about);
          }
        }
        y += depth[row] * (thin + 1);
      }
    });
    root.append(plot);
    // Hover, and zoom by dragging.
    const choice = svg(
        'rect', {y: 0, height: bottom, fill: css('accent'), opacity: 0.14, visibility: 'hidden'});
    root.append(choice);
    let from = null;
    const time = (event) => view[0] +
        (event.clientX - root.getBoundingClientRect().left - left) / (width - left - right) *
            (view[1] - view[0]);
    root.addEventListener('pointerdown', (event) => {
      if (event.pointerType === 'mouse' && event.button === 0) {
        from = event.clientX;
        event.preventDefault();
      }
    });
    root.addEventListener('pointermove', (event) => {
      if (from != null && Math.abs(event.clientX - from) > 3) {
        hideTip();
        const base = root.getBoundingClientRect().left;
        set(choice, {
          x: Math.min(from, event.clientX) - base,
          width: Math.abs(event.clientX - from),
          visibility: 'visible'
        });
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
        if (next[1] - next[0] > 1) return show(next, most);
      }
      from = null;
      set(choice, {visibility: 'hidden'});
    };
    root.addEventListener('pointerup', finish);
    root.addEventListener('pointerleave', (event) => {
      hideTip();
      if (from != null) finish(event);
    });
    root.addEventListener('dblclick', () => show([0, one.length], most));
    return root;
  };
  const show = (times, ranks) => {
    view = times;
    most = ranks;
    tools();
    redraw();
  };
  function tools() {
    const zoomed = view[1] - view[0] < one.length;
    const whole = el('button', {type: 'button'}, 'Whole step');
    whole.onclick = () => show([0, one.length], most);
    const all = el('button', {type: 'button'}, `Show all ${one.ranks.length} ranks`);
    all.onclick = () => show(view, Infinity);
    at('timeline-tools')
        .replaceChildren(
            ...(zoomed ? [whole, el('span', {}, `${ms(view[0])} to ${ms(view[1])}`)] :
                    matchMedia('(pointer: fine)').matches ?
                         [el('span', {}, 'Drag across the picture to zoom in.')] :
                         []),
            ...(one.ranks.length > most ? [all] : []));
  }
  tools();
  const redraw = figure('timeline', draw);

  // Narrow windows leave out the columns of `optional`.
  const optional = (cat) => (['sharding', 'other', 'user'].includes(cat) ? {class: 'optional'} : {});
  const head = [
    el('th'), el('th', {class: 'optional'}, 'step'),
    ...used.map((cat) => el('th', optional(cat), activityName(cat))), el('th', {}, 'waiting')
  ];
  const body = one.ranks.slice(0, 16).map(
      (rank) =>
          el('tr', {}, el('td', {}, `rank ${rank.rank}`),
             el('td', {class: 'optional'}, ms(rank.end - rank.begin)),
             ...used.map((cat) => el('td', optional(cat), ms(total(rank, cat)))),
             el('td', {}, ms(waited(rank)))));
  at('times').replaceChildren(
      el('table', {}, el('thead', {}, el('tr', {}, ...head)), el('tbody', {}, ...body)));
}

// ------------------------------------------------------------ Memory

const kCategories =
    ['shards', 'gradients', 'other', 'gathered', 'communication'];  // from below: what stays, first
const categoryName = (name) => ({
  gathered: 'gathered parameters',
  communication: 'communication buffers',
  other: 'activations, optimizer, rest'
}[name] || name);

function memory(one) {
  const ranks = one.ranks.filter((rank) => rank.memory.length > 1);
  if (ranks.length === 0) {
    at('memory-section').remove();
    return;
  }
  let chosen = ranks[0];
  const sum = (sample) => kCategories.reduce((all, name) => all + (sample[name] || 0), 0);
  const highest = (f) => Math.max(...chosen.memory.map(([, sample]) => f(sample)));
  const top =
      Math.max(...ranks.flatMap((rank) => rank.memory.map(([, sample]) => sum(sample)))) * 1.06;
  const describe = () => {
    at('memory-lede').textContent =
        `Bytes on rank ${chosen.rank} by category, counted where phases begin and end. Highest: ${
            bytes(highest(sum))}.`;
    legend(
        'memory-legend',
        [...kCategories].reverse().map((name) => ({
                                         color: css(name),
                                         name: categoryName(name),
                                         value: bytes(highest((sample) => sample[name] || 0))
                                       })));
  };
  const redraw = figure('memory', (width) => {
    const narrow = width < 480;
    const box = {left: narrow ? 52 : 58, right: 1, top: 8, bottom: 24}, h = narrow ? 220 : 270;
    const x = (t) => box.left + t / one.length * (width - box.left - box.right);
    const y = (v) => h - box.bottom - v / top * (h - box.top - box.bottom);
    const root = drawing(width, h, 'Memory by category over one step');
    const levels = byteTicks(top, 4);
    const texts = axisTexts(levels, (v) => bytes(v).replace(/\.0+(?= )/, ''));
    root.append(...gridOf(box, width, y, levels, texts));
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
      root.append(svg('path', {
        d: path([...high, ...low.reverse()], x, y) + 'Z',
        fill: css(name),
        opacity: 0.88,
        'data-category': name
      }));
    }
    root.append(across(box.left, width - box.right, h - box.bottom, {class: 'axis'}));
    const times = ticks(0, one.length, width / 120);
    axisTexts(times, milliseconds).forEach((text, i) => {
      const anchor = x(times[i]) > width - 20 ? 'end' : 'middle';
      root.append(svg('text', {x: x(times[i]), y: h - 6, 'text-anchor': anchor}, text));
    });
    crosshair(root, box, width, h, [], (event, share) => {
      const t = share * one.length;
      const sample = chosen.memory.filter(([when]) => when <= t).pop() || chosen.memory[0];
      const doing = chosen.slices.find((slice) => slice.begin <= t && t < slice.end);
      showTip(
          event,
          ms(t) +
              (doing && doing.cat !== 'other' ? ` · ${activityName(doing.cat)} ${doing.name}` : ''),
          [...kCategories]
              .reverse()
              .map((name) => [categoryName(name), bytes(sample[1][name] || 0)])
              .concat([['all', bytes(sum(sample[1]))]]));
      return x(t);
    });
    return root;
  });
  const buttons = ranks.slice(0, 32).map((rank) => {
    const button = el(
        'button', {type: 'button', 'aria-pressed': String(rank === chosen)}, `rank ${rank.rank}`);
    button.onclick = () => {
      chosen = rank;
      buttons.forEach((each) => each.setAttribute('aria-pressed', String(each === button)));
      describe();
      redraw();
    };
    return button;
  });
  if (buttons.length > 1)
    at('memory-tools').replaceChildren(...buttons);
  else
    at('memory-tools').remove();
  describe();
}
