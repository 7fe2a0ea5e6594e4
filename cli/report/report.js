// The parts of the page, of what the run has left; behind the other scripts.

// ------------------------------------------------------------ The run

const steps = (data.metrics || []).filter((line) => finite(line.step) && 'loss' in line);
const validations = (data.metrics || []).filter((line) => finite(line.validation_loss));
const column = (f) => steps.map((line) => [line.step, f(line)]).filter((point) => finite(point[1]));
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1];
const baseline = (data.metrics || []).map((line) => line.byte_frequency_loss).filter(finite).pop();
const option = (...names) => {
  for (const name of names) {
    const value = name.split('.').reduce((node, key) => (node == null ? node : node[key]), config);
    if (value != null && value !== '') return value;
  }
  return null;
};
const groups = Array.isArray(data.groups) ? data.groups : [];
const plural = (n, noun) => `${digits(n, 0)} ${noun}${n === 1 ? '' : 's'}`;

function header() {
  const name = data.name || option('name') || 'run';
  document.title = `${name} · fsdp train`;
  at('name').textContent = name;
  at('kicker').textContent = 'fsdp train';
  const params = option('parameters', 'model.parameters', 'num_params') ||
      groups.reduce((sum, group) => sum + group.numel, 0);
  const layers = option('model.layers', 'layers'), dim = option('model.dim', 'dim');
  const sizes = String(option('mesh') || '').match(/\d+/g);
  const ranks = option('ranks', 'world_size') ||
      (sizes && sizes.reduce((all, size) => all * Number(size), 1));
  const pieces = [];
  if (params)
    pieces.push(
        `${count(params)} parameters` +
        (layers && dim ? ` in ${plural(layers, 'layer')} of ${dim}` : ''));
  if (ranks)
    pieces.push(
        plural(ranks, 'rank') + (option('mesh') ? ` (${option('mesh')})` : ''));
  if (groups.length) pieces.push(plural(groups.length, 'group'));
  const batch = option('batch'), context = option('context');
  if (batch && context) pieces.push(`${batch} × ${context} tokens per step`);
  if (option('seed') != null) pieces.push(`seed ${option('seed')}`);
  at('summary').textContent = pieces.length ? pieces.join(', ') + '.' : '';

  const facts = [];
  const fact = (label, value, note) => facts.push(
      el('div', {}, el('dt', {}, label), el('dd', {}, value),
         note ? el('div', {class: 'note'}, note) : null));
  const losses = column((line) => line.loss).map((point) => point[1]);
  if (losses.length)
    fact('Loss', digits(mean(losses.slice(-10)), 3), `from ${digits(losses[0], 3)}`);
  if (validations.length) {
    fact(
        'Validation loss', digits(validations.at(-1).validation_loss, 3),
        finite(baseline) ? `bytes alone: ${digits(baseline, 3)}` : null);
  }
  const speed = column((line) => line.tokens_per_s).map((point) => point[1]);
  if (speed.length) fact('Tokens per second', count(median(speed)), 'median step');
  const exposed = column((line) => line.exposed_s / line.seconds).map((point) => point[1]);
  if (exposed.length) fact('Waiting', percent(median(exposed)), 'for communication');
  const peaks = steps.map((line) => line.memory && line.memory.peak).filter(finite);
  if (peaks.length) fact('Peak memory', bytes(Math.max(...peaks)), 'rank 0');
  const time = steps.reduce((sum, line) => sum + (line.seconds || 0), 0);
  if (time > 0)
    fact(
        'Time', seconds(time),
        `${plural(steps.length, 'step')}, ${
            count(steps.reduce(
                (sum, line) => sum + (line.seconds * line.tokens_per_s || 0), 0))} tokens`);
  at('facts').replaceChildren(...facts);
  if (!facts.length) at('facts').remove();
}

function training() {
  if (column((line) => line.loss).length === 0) {
    at('training')
        .replaceChildren(
            el('h2', {}, 'Loss'),
            el('p', {class: 'missing'}, 'metrics.jsonl has no step with a loss.'));
    return;
  }
  at('loss-lede').textContent = 'Cross entropy in nats per byte' +
      (steps.length > 40 ? '; the strong line is a running mean.' : '.');
  const items = [{color: css('accent'), name: 'training', shape: 'thin'}];
  if (validations.length)
    items.push({color: css('second'), name: 'validation, on held-out text', shape: 'thin'});
  if (finite(baseline)) items.push({name: 'byte frequencies alone', shape: 'dashed'});
  legend('loss-legend', items);
  figure('loss', lineChart({
           label: 'Training and validation loss by step',
           height: 300,
           format: (v) => three(v),
           levels: finite(baseline) ? [{name: 'byte frequencies', value: baseline}] : [],
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
  const same = (a, b) => ['numel', 'dtype', 'shard_bytes', 'gathered_bytes', 'padding_bytes'].every(
      (key) => a[key] === b[key]);
  const runs = [];
  for (const group of groups) {
    if (runs.length && same(runs.at(-1)[0], group))
      runs.at(-1).push(group);
    else
      runs.push([group]);
  }
  const shown = runs.flatMap((run) => (run.length > 3 ? [run] : run.map((group) => [group])));
  const head = ['Module', 'Parameters', 'Shard', 'Gathered', 'Padding'];
  const table =
      el('table', {},
         el('thead', {}, el('tr', {}, ...head.map((name, i) => el('th', {scope: 'col'}, name)))));
  const body = el('tbody');
  for (const run of shown) {
    const group = run[0];
    const name = (one) => one.name || '(root)';
    body.append(el(
        'tr', {},
        el('td', {},
           el('code', {}, run.length > 1 ? `${name(group)} … ${name(run.at(-1))}` : name(group)),
           ...(run.length > 1 ? [' ', el('small', {}, `${run.length} alike, each`)] : [])),
        el('td', {}, count(group.numel),
           group.dtype ? el('small', {class: 'optional'}, ' ' + String(group.dtype).toLowerCase()) :
                         null),
        el('td', {}, bytes(group.shard_bytes)), el('td', {}, bytes(group.gathered_bytes)),
        el('td', {}, group.padding_bytes ? bytes(group.padding_bytes) : '–',
           group.padding_bytes ? el('small', {class: 'optional'},
                                    ` ${percent(group.padding_bytes / group.gathered_bytes)}`) :
                                 null)));
  }
  const all = (key) => groups.reduce((sum, group) => sum + (group[key] || 0), 0);
  table.append(
      body,
      el('tfoot', {},
         el('tr', {}, el('td', {}, plural(groups.length, 'group')),
            el('td', {}, count(all('numel'))), el('td', {}, bytes(all('shard_bytes'))),
            el('td', {}, bytes(all('gathered_bytes'))),
            el('td', {}, all('padding_bytes') ? bytes(all('padding_bytes')) : '–'))));
  at('groups').replaceChildren(table);
}

function options() {
  const rows = [];
  const walk = (node, prefix) => {
    for (const [key, value] of Object.entries(node)) {
      if (value && typeof value === 'object' && !Array.isArray(value))
        walk(value, prefix + key + '.');
      else
        rows.push(
            el('div', {}, el('dt', {}, el('code', {}, prefix + key)),
               el('dd', {class: 'mono'}, Array.isArray(value) ? value.join(', ') : String(value))));
    }
  };
  walk(config, '');
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
  at('timeline-section')
      .replaceChildren(
          el('h2', {}, 'One step, drawn to scale'),
          el('p', {class: 'missing'}, 'The run has no trace.json, or no whole step in it.'));
  at('memory-section').remove();
}
groupTable();
options();
at('footer').textContent = `Written by fsdp${data.version ? ' ' + data.version : ''}.` +
    (one ? ' The whole trace.json opens in ui.perfetto.dev.' : '');
document.documentElement.dataset.ready = 'yes';
