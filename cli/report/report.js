// The parts of the page, of what the run has left; behind the other scripts.

// ------------------------------------------------------------ The run

const steps = data.metrics.filter((line) => 'loss' in line);
const validations = data.metrics.filter((line) => finite(line.validation_loss));
const interruptions = data.metrics.filter((line) => finite(line.lost_steps));
const column = (f) => steps.map((line) => [line.step, f(line)]).filter((point) => finite(point[1]));
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1];
const sumOf = (items, f) => items.reduce((sum, item) => sum + (f(item) || 0), 0);
const baseline = data.metrics.map((line) => line.byte_frequency_loss).filter(finite).pop();
const groups = data.groups || [];
const plural = (n, noun) => `${digits(n, 0)} ${noun}${n === 1 ? '' : 's'}`;

function header() {
  document.title = `${data.name} · fsdp train`;
  at('name').textContent = data.name;
  const {layers, dim, mesh, batch, context, seed} = config;
  const sizes = String(mesh || '').match(/\d+/g);
  const ranks = config.ranks || (sizes && sizes.reduce((all, size) => all * Number(size), 1));
  const params = sumOf(groups, (group) => group.numel);
  const pieces = [];
  if (params)
    pieces.push(
        `${count(params)} parameters` +
        (layers && dim ? ` in ${plural(layers, 'layer')} of ${dim}` : ''));
  if (ranks) pieces.push(plural(ranks, 'rank') + (mesh ? ` (${mesh})` : ''));
  if (groups.length) pieces.push(plural(groups.length, 'group'));
  if (batch && context) pieces.push(`${batch} × ${context} tokens per step`);
  if (seed != null) pieces.push(`seed ${seed}`);
  at('summary').textContent = pieces.length ? pieces.join(', ') + '.' : '';

  const facts = [];
  const fact = (label, value, note) => facts.push(
      el('div', {}, el('dt', {}, label), el('dd', {}, value),
         note ? el('div', {class: 'note'}, note) : null));
  const values = (f) => column(f).map((point) => point[1]);
  const losses = values((line) => line.loss);
  if (losses.length)
    fact('Loss', digits(mean(losses.slice(-10)), 3), `from ${digits(losses[0], 3)}`);
  if (validations.length) {
    fact(
        'Validation loss', digits(validations.at(-1).validation_loss, 3),
        finite(baseline) ? `token frequencies alone: ${digits(baseline, 3)}` : null);
  }
  const speed = values((line) => line.tokens_per_s);
  if (speed.length) fact('Tokens per second', count(median(speed)), 'median step');
  const flops = values((line) => line.flops_per_s);
  const used = values((line) => line.mfu);
  if (used.length)
    fact('Utilisation', percent(median(used)), `${operations(median(flops))} per rank`);
  else if (flops.length)
    fact('Computed', operations(median(flops)), 'per rank, median step');
  const exposed = values((line) => line.exposed_s / line.seconds);
  if (exposed.length) fact('Waiting', percent(median(exposed)), 'for communication, median step');
  const peaks = values((line) => line.memory && line.memory.peak);
  if (peaks.length) fact('Peak memory', bytes(Math.max(...peaks)), 'rank 0');
  const time = sumOf(steps, (line) => line.seconds);
  const tokens = sumOf(steps, (line) => line.seconds * line.tokens_per_s);
  if (time > 0)
    fact('Time', seconds(time), `${plural(steps.length, 'step')}, ${count(tokens)} tokens`);
  if (interruptions.length) {
    const again = sumOf(interruptions, (line) => line.lost_steps);
    const lost = sumOf(interruptions, (line) => line.lost_seconds);
    fact(
        'Interruptions', digits(interruptions.length, 0),
        `${plural(again, 'step')} made again, ${seconds(lost)} lost`);
  }
  at('facts').replaceChildren(...facts);
  if (!facts.length) at('facts').remove();
}

function training() {
  if (column((line) => line.loss).length === 0)
    return missing('training', 'metrics.jsonl has no step with a loss.', 'Loss');
  at('loss-lede').textContent = 'Cross entropy in nats per token' +
      (steps.length > 40 ? '; the strong line is a running mean.' : '.');
  const items = [{color: css('accent'), name: 'training', shape: 'thin'}];
  if (validations.length)
    items.push({color: css('second'), name: 'validation, on held-out text', shape: 'thin'});
  if (finite(baseline)) items.push({name: 'token frequencies alone', shape: 'dashed'});
  legend('loss-legend', items);
  figure('loss', lineChart({
           label: 'Training and validation loss by step',
           height: 300,
           format: (v) => three(v),
           levels: finite(baseline) ? [{name: 'token frequencies', value: baseline}] : [],
           series: [
             {
               name: 'training',
               color: css('accent'),
               smooth: true,
               points: column((line) => line.loss),
               format: (v) => digits(v, 4)
             },
             {
               name: 'validation',
               color: css('second'),
               marks: true,
               format: (v) => digits(v, 4),
               points: validations.map((line) => [line.step, line.validation_loss])
             }
           ]
         }));
  const small = (id, label, format, f, more = {}) => {
    const points = column(f);
    if (points.length === 0) return missing(id, 'Not recorded.');
    figure(
        id, lineChart({
          label,
          height: 170,
          format,
          zero: true,
          series: [{name: label, color: css(more.color || 'accent'), smooth: !more.plain, points}],
          ...more
        }));
  };
  small('throughput', 'tokens/s', (v) => count(v), (line) => line.tokens_per_s);
  small(
      'exposed', 'waiting', (v) => percent(v), (line) => line.exposed_s / line.seconds,
      {color: 'waiting', upper: 1, axisFormat: (v) => digits(100 * v, 2) + ' %'});
  small('norm', 'gradient norm', (v) => three(v), (line) => line.grad_norm);
  small('rate', 'learning rate', power, (line) => line.lr, {plain: true});
}

// ------------------------------------------------------------ Groups and options

function groupTable() {
  if (groups.length === 0) {
    at('groups-section').remove();
    return;
  }
  // Equal neighbours (the layers of a model) become one row.
  const compared = ['numel', 'shard_bytes', 'gathered_bytes', 'padding_bytes', 'on_host'];
  const same = (a, b) => compared.every((key) => a[key] === b[key]);
  const runs = [];
  for (const group of groups) {
    if (runs.length && same(runs.at(-1)[0], group))
      runs.at(-1).push(group);
    else
      runs.push([group]);
  }
  const shown = runs.flatMap((run) => (run.length > 3 ? [run] : run.map((group) => [group])));
  const name = (group) => group.name || '(root)';
  const cell = (...children) => el('td', {}, ...children);
  const optional = (text) => el('small', {class: 'optional'}, ' ' + text);
  const sizes = (group, share) => [
    cell(bytes(group.shard_bytes), group.on_host ? optional('on the host') : ''),
    cell(bytes(group.gathered_bytes)),
    group.padding_bytes ? cell(bytes(group.padding_bytes), share) : cell('–')
  ];
  const head = ['Module', 'Parameters', 'Shard', 'Gathered', 'Padding'];
  const body = shown.map((run) => {
    const group = run[0];
    const names = run.length > 1 ?
        cell(
            el('code', {}, `${name(group)} … ${name(run.at(-1))}`), ' ',
            el('small', {}, `${run.length} alike, each`)) :
        cell(el('code', {}, name(group)));
    return el(
        'tr', {}, names, cell(count(group.numel)),
        ...sizes(group, optional(percent(group.padding_bytes / group.gathered_bytes))));
  });
  const all = {};
  for (const key of ['numel', 'shard_bytes', 'gathered_bytes', 'padding_bytes'])
    all[key] = sumOf(groups, (group) => group[key]);
  const foot = [cell(plural(groups.length, 'group')), cell(count(all.numel)), ...sizes(all)];
  at('groups').replaceChildren(
      el('table', {},
         el('thead', {}, el('tr', {}, ...head.map((title) => el('th', {scope: 'col'}, title)))),
         el('tbody', {}, ...body), el('tfoot', {}, el('tr', {}, ...foot))));
}

function options() {
  const rows = Object.entries(config).map(
      ([key, value]) =>
          el('div', {}, el('dt', {}, el('code', {}, key)),
             el('dd', {class: 'mono'}, Array.isArray(value) ? value.join(', ') : String(value))));
  if (rows.length)
    at('config').replaceChildren(...rows);
  else
    at('config-section').remove();
}

header();
training();
const one = data.trace ? oneStep(data.trace) : null;
if (one) {
  timeline(one);
  memory(one);
} else {
  missing(
      'timeline-section', 'The run has no trace.json, or no whole step in it.',
      'One step, drawn to scale');
  at('memory-section').remove();
}
groupTable();
options();
at('footer').textContent = `Written by fsdp ${data.version}.` +
    (one ? ' The whole trace.json opens in ui.perfetto.dev.' : '');
document.documentElement.dataset.ready = 'yes';
