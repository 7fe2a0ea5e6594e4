#!/usr/bin/env python3
"""`./fsdp chaos`: faults at random moments of real training jobs.

Each round starts `fsdp train` over several processes, does one kind of harm to it, lets it go on,
and compares it with an undisturbed run: every loss must be the same to the last bit, or within
rounding if the number of ranks changed on the way. The seed decides the order of the faults and the
moments. docs/reliability.md says what is promised for each fault.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

OPTIONS = ('--dim 32 --layers 2 --lr 1e-3 --batch 8 --context 32 --device cpu --schedule constant '
           '--save-every 20 --keep 3').split()
PATIENCE = 240  # seconds that any part of a round may take
IN_TIME = 15  # seconds from a signal to the end: 5 are promised, but this machine may be busy


class Broken(Exception):
    """A promise was not kept."""


def expect(good, what):
    if not good:
        raise Broken(what)


def children_of(pid):
    listed = subprocess.run(['pgrep', '-P', str(pid)], capture_output=True, text=True)
    return [int(word) for word in listed.stdout.split()]


def free_port():
    with socket.socket() as probe:
        probe.bind(('', 0))
        return probe.getsockname()[1]


def own_address():
    """An address of this machine that is not the loopback: launchers of several machines want one.
    None if there is no network."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(('10.255.255.255', 1))  # sends nothing
            return probe.getsockname()[0]
    except OSError:
        return None


def metrics(run, key='loss'):
    path = run / 'metrics.jsonl'
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            pass  # the run was killed while it wrote this
    return [line for line in found if key in line]


class Job:
    """A training job over `nodes` launchers with `ranks` processes each, in its own folder."""

    def __init__(self, tool, folder, steps, ranks=2, nodes=1, min_ranks=None):
        self.run, self.log = folder / 'run', folder / 'log'
        self.tool, self.ranks, self.nodes = tool, ranks, nodes
        self.train = [tool, 'train', '--data', str(folder.parent / 'text'), *OPTIONS, '--steps',
                      str(steps), '--run', str(self.run), '--go-on']
        self.min_ranks = min_ranks or ranks * nodes
        self.launchers = []

    def start_node(self, node):
        words = [self.tool, 'run', '-n', str(self.ranks), '--restarts', '1000', '--min-ranks',
                 str(self.min_ranks)]
        if self.nodes > 1:
            words += ['--nnodes', str(self.nodes), '--node-rank', str(node), '--master',
                      f'{own_address()}:{self.port}']
        with open(self.log, 'a') as log:
            return subprocess.Popen([*words, '--', *self.train], stdout=log,
                                    stderr=subprocess.STDOUT, start_new_session=True)

    def start(self):
        self.port = free_port()
        self.launchers = [self.start_node(node) for node in range(self.nodes)]
        return self

    def is_running(self):
        return any(launcher.poll() is None for launcher in self.launchers)

    def rank_pids(self):
        return [pid for launcher in self.launchers for pid in children_of(launcher.pid)]

    def num_steps(self):
        return len(metrics(self.run))

    def wait_for_step(self, step):
        end = time.monotonic() + PATIENCE
        while self.num_steps() < step and self.is_running():
            expect(time.monotonic() < end, f'step {step} does not come')
            time.sleep(0.02)

    def wait(self):
        codes = []
        for launcher in self.launchers:
            try:
                codes.append(launcher.wait(PATIENCE))
            except subprocess.TimeoutExpired:
                raise Broken('the job does not end') from None
        return codes

    def end_in_time(self, number, ranks_too=False):
        """Sends a signal to the launchers, or to the ranks, too, as some schedulers do. Expects
        that everything ends soon, and returns after how many seconds it did."""
        ranks = self.rank_pids()
        sent = time.monotonic()
        for launcher in self.launchers:
            if launcher.poll() is None:
                kill(launcher.pid, number)
        for pid in ranks if ranks_too else []:
            kill(pid, number)
        self.wait()
        took = time.monotonic() - sent
        expect(took < IN_TIME, f'alive {IN_TIME} s after a signal')
        expect(not any(os.path.exists(f'/proc/{pid}') for pid in ranks), 'ranks are left behind')
        return took

    def finish(self):
        """Starts the job again, as a scheduler would, until it is done."""
        for _ in range(3):
            if not self.is_running():
                self.start()
            if set(self.wait()) == {0}:
                return
        raise Broken('the job does not get to its end')

    def kill_all(self):
        for launcher in self.launchers:
            for pid in children_of(launcher.pid):
                kill(pid)
            if launcher.poll() is None:
                launcher.kill()
            launcher.wait()


def kill(pid, number=signal.SIGKILL):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


# ------------------------------------------------------------ Faults: each does its harm to a job


def rank_dies(job, draw):
    for _ in range(draw.randint(1, 3)):
        job.wait_for_step(job.num_steps() + draw.randint(1, 15))
        time.sleep(draw.random() / 2)
        pids = job.rank_pids()
        if pids:
            kill(draw.choice(pids))


def rank_is_slow(job, draw):
    for _ in range(3):
        pids = job.rank_pids()
        if pids:
            pid = draw.choice(pids)
            kill(pid, signal.SIGSTOP)
            time.sleep(draw.uniform(0.1, 2))
            kill(pid, signal.SIGCONT)


def rank_hangs(job, draw):
    pids = job.rank_pids()
    if pids:
        kill(draw.choice(pids), signal.SIGSTOP)
    time.sleep(draw.random())
    job.end_in_time(signal.SIGTERM)


def launcher_dies(job, draw):
    ranks = job.rank_pids()
    job.launchers[0].kill()
    job.launchers[0].wait()
    end = time.monotonic() + IN_TIME
    while any(os.path.exists(f'/proc/{pid}') for pid in ranks):
        expect(time.monotonic() < end, 'ranks outlive their launcher')
        time.sleep(0.05)


def person_interrupts(job, draw):
    job.end_in_time(draw.choice([signal.SIGINT, signal.SIGTERM]))


def save_is_interrupted(job, draw):
    end = time.monotonic() + PATIENCE
    while not list((job.run / 'checkpoints').glob('*.fsdp-saving')) and job.is_running():
        expect(time.monotonic() < end, 'nothing is saved')
    for pid in job.rank_pids():
        kill(pid)


def checkpoint_is_damaged(job, draw):
    job.end_in_time(signal.SIGTERM)
    saved = sorted((job.run / 'checkpoints').glob('step_????????'))
    if len(saved) < 2:
        return
    path = draw.choice(list(saved[-1].glob('rank_*.safetensors')))
    data = bytearray(path.read_bytes())
    data[-draw.randint(1, len(data) // 2)] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    job.start()
    expect(job.wait() == [0], 'a damaged checkpoint ends the job')
    expect('the run goes on from' in job.log.read_text(), 'nobody speaks of the damage')


def folder_is_in_use(job, draw):
    second = subprocess.run([*job.train, '--ranks', '1'], capture_output=True, text=True)
    if job.is_running():
        expect(second.returncode == 4 and 'another run writes to' in second.stderr,
               f'a second run was not refused: {second.returncode} {second.stderr}')


def strangers_connect(job, draw):
    lines = [line.split() for line in pathlib.Path('/proc/net/tcp').read_text().splitlines()]
    listening = [line[1] for line in lines if line[3] == '0A' and line[1].startswith('0100007F')]
    for address in listening[:20]:
        with socket.socket() as stranger:
            stranger.settimeout(0.2)
            try:
                stranger.connect(('127.0.0.1', int(address.split(':')[1], 16)))
                stranger.send(draw.randbytes(draw.randint(1, 400)))
            except OSError:
                pass


def node_is_lost(job, draw):
    kill(job.launchers[1].pid)
    job.launchers[1].wait()
    time.sleep(draw.uniform(0, 9))
    if job.launchers[0].poll() is None:
        job.launchers[1] = job.start_node(1)


FAULTS = [rank_dies, rank_is_slow, rank_hangs, launcher_dies, person_interrupts,
          save_is_interrupted, checkpoint_is_damaged, folder_is_in_use, strangers_connect,
          node_is_lost]

# ------------------------------------------------------------ Rounds


def compare(job, reference):
    losses = {line['step']: line['loss'] for line in metrics(job.run)}
    expect(len(losses) == len(reference), f'{len(losses)} steps instead of {len(reference)}')
    worst = max(abs(losses[line['step']] - line['loss']) for line in reference)
    same_ranks = job.min_ranks == job.ranks * job.nodes
    expect(worst <= (0 if same_ranks else 2e-3), f'a loss differs by {worst}')
    return worst


def write_text(folder):
    (folder / 'text').write_text(
        ''.join(f'for (int i = 0; i < {i}; ++i) total += row[i];\n' for i in range(2000)))


def make_reference(tool, folder, steps, ranks=2):
    write_text(folder)
    (folder / 'reference').mkdir()
    job = Job(tool, folder / 'reference', steps)
    subprocess.run([tool, 'run', '-n', str(ranks), '--', *job.train], check=True,
                   stdout=subprocess.DEVNULL)
    return metrics(job.run)


def one_round(number, fault, args, folder, reference):
    draw = random.Random(f'{args.seed} {number}')
    own = folder / f'round-{number}'
    own.mkdir()
    is_node = fault is node_is_lost
    job = Job(args.tool, own, args.steps, nodes=2 if is_node else 1, min_ranks=2).start()
    start = time.monotonic()
    try:
        job.wait_for_step(draw.randint(1, args.steps * 2 // 3))
        time.sleep(draw.random() / 10)
        fault(job, draw)
        job.finish()
        worst = compare(job, reference)
    finally:
        job.kill_all()
    print(f'{number:5}  {fault.__name__:22} largest difference {worst:.1e}, '
          f'{time.monotonic() - start:.1f} s', flush=True)
    shutil.rmtree(own)


def one_signal(number, args, folder, reference, seconds):
    """Sends a signal at a random moment of a job, and lets the job go on later. Returns the seconds
    from the signal to the end, and whether the job was running, and had steps left, before it."""
    draw = random.Random(f'{args.seed} {number}')
    own = folder / f'signal-{number}'
    own.mkdir()
    job = Job(args.tool, own, args.steps).start()
    try:
        time.sleep(draw.uniform(0, seconds))
        was_running = job.is_running()
        has_steps_left = was_running and job.num_steps() < args.steps
        sent = draw.choice([signal.SIGINT, signal.SIGTERM])
        took = job.end_in_time(sent, ranks_too=draw.random() < 0.5)
        code = job.launchers[0].returncode
        # A process that has just begun is ended by the system, with a negative code. One that has
        # nothing left to do may end before it sees the signal.
        expect(code in (128 + sent, -sent) or (code == 0 and not has_steps_left),
               f'{sent.name} was lost: the exit code is {code}')
        job.finish()
        compare(job, reference)
    finally:
        job.kill_all()
    shutil.rmtree(own)
    return took, was_running, has_steps_left


def signal_loop(args, folder):
    """Signals at random moments, several jobs at a time."""
    start = time.monotonic()
    reference = make_reference(args.tool, folder, args.steps)
    seconds = time.monotonic() - start
    at_a_time = max(1, (os.cpu_count() or 1) // 2)
    print(f'a job takes {seconds:.1f} s; {at_a_time} at a time', flush=True)
    with concurrent.futures.ThreadPoolExecutor(at_a_time) as pool:
        ended = list(pool.map(lambda number: one_signal(number, args, folder, reference, seconds),
                              range(args.signals)))
    times, running, early = zip(*ended)
    print(f'{args.signals} signals, {sum(running)} to running jobs, {sum(early)} before the last '
          f'step; none lost, every run went on to the same losses; from signal to end: longest '
          f'{max(times):.1f} s, {sum(took > 5 for took in times)} took more than 5 s')


def soak(args, folder):
    """One long run that saves all the time. No process may grow by more than 2 %."""
    write_text(folder)
    (folder / 'long').mkdir()
    job = Job(args.tool, folder / 'long', args.soak).start()
    samples = []
    while job.is_running():
        sizes = []
        for pid in job.rank_pids():
            try:
                status = pathlib.Path(f'/proc/{pid}/status').read_text()
                sizes.append([int(re.search(rf'{key}:\s+(\d+)', status)[1])
                              for key in ('VmRSS', 'Threads')] +
                             [len(os.listdir(f'/proc/{pid}/fd'))])
            except (OSError, TypeError):
                pass  # the process ends
        if len(sizes) == job.ranks:
            samples.append([max(column) for column in zip(*sizes)])
        time.sleep(0.5)
    expect(job.wait() == [0], 'the job has failed')
    expect(len(samples) >= 40, 'the run is too short to see growth: more --soak')
    quarter = len(samples) // 4
    early, late = ([max(column) for column in zip(*part)]
                   for part in (samples[quarter:2 * quarter], samples[-quarter:]))
    print(f'{args.soak} steps, {args.soak // 20} checkpoints; the largest process in the second '
          f'and in the last quarter of the run: {early[0]} and {late[0]} KiB, {early[1]} and '
          f'{late[1]} threads, {early[2]} and {late[2]} open files')
    expect(late[0] <= 1.02 * early[0] and late[1] <= early[1] and late[2] <= early[2] + 2,
           'a process has grown')


def kill_loop(args, folder):
    """One long run, in which ranks, launchers and nodes are killed all the time."""
    draw = random.Random(args.seed)
    reference = make_reference(args.tool, folder, args.steps, ranks=4)
    (folder / 'long').mkdir()
    nodes = 2 if own_address() else 1
    job = Job(args.tool, folder / 'long', args.steps, nodes=nodes, ranks=4 // nodes).start()
    kills = {'rank': 0, 'launcher of node 0': 0} | ({'node 1': 0} if nodes == 2 else {})
    while sum(kills.values()) < args.kills:
        time.sleep(draw.uniform(0.3, args.pause))
        if all(launcher.poll() == 0 for launcher in job.launchers):
            break  # done before its last kill
        for node, launcher in enumerate(job.launchers):
            if launcher.poll() is not None and job.launchers[0].poll() is None:
                job.launchers[node] = job.start_node(node)
        if job.launchers[0].poll() is not None:
            job.kill_all()
            job.start()
            continue
        victim = draw.choices(list(kills), [8, 1, 1][:len(kills)])[0]
        pids = job.rank_pids()
        if victim == 'rank' and pids:
            kill(draw.choice(pids))
        elif victim != 'rank':
            kill(job.launchers[0 if victim.startswith('launcher') else 1].pid)
        else:
            continue
        kills[victim] += 1
        print(f'{sum(kills.values()):5}  {victim:20} after step {job.num_steps()}', flush=True)
    if any(launcher.poll() is not None for launcher in job.launchers):
        job.kill_all()
    job.finish()
    worst = compare(job, reference)
    lost = metrics(job.run, 'lost_steps')
    print(f'{sum(kills.values())} kills ({kills}): {args.steps} steps, '
          f'{sum(line["lost_steps"] for line in lost)} made again, largest difference of a loss '
          f'{worst:.1e}')
    expect(sum(kills.values()) == args.kills, 'the run ended before its last kill: more --steps')


def main():
    parser = argparse.ArgumentParser(prog='fsdp chaos', description=__doc__)
    parser.add_argument('--tool', help=argparse.SUPPRESS, required=True)
    parser.add_argument('--minutes', type=float, default=5, help='how long to go on [5]')
    parser.add_argument('--seed', type=int, default=1, help='[1]')
    parser.add_argument('--steps', type=int, default=150, help='steps of each run [150]')
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument('--kills', type=int, help='instead: kill parts of one long run this often')
    instead.add_argument('--signals', type=int, help='instead: as many signals at random moments')
    instead.add_argument('--soak', type=int, help='instead: one run of as many steps, watched')
    parser.add_argument('--pause', type=float, default=6,
                        help='most seconds between two kills [6]')
    parser.add_argument('--faults', help='only those whose name contains this')
    args = parser.parse_args()
    for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'):
        os.environ.pop(name, None)
    os.environ.setdefault('OMP_NUM_THREADS', '1')  # the models are tiny, and several jobs may run
    folder = pathlib.Path(tempfile.mkdtemp(prefix='fsdp-chaos-'))
    try:
        if args.kills:
            kill_loop(args, folder)
        elif args.signals:
            signal_loop(args, folder)
        elif args.soak:
            soak(args, folder)
        else:
            reference = make_reference(args.tool, folder, args.steps)
            faults = [fault for fault in FAULTS if (args.faults or '') in fault.__name__ and
                      (fault is not node_is_lost or own_address())]
            tries = dict.fromkeys((fault.__name__ for fault in faults), 0)
            end = time.monotonic() + 60 * args.minutes
            number = 0
            while time.monotonic() < end:
                if number % len(faults) == 0:
                    random.Random(f'{args.seed} {number} order').shuffle(faults)
                fault = faults[number % len(faults)]
                number += 1
                one_round(number, fault, args, folder, reference)
                tries[fault.__name__] += 1
            print('\n| fault | survived |\n|---|---|')
            for name, count in sorted(tries.items()):
                print(f'| {name.replace("_", " ")} | {count} of {count} |')
    except Broken as broken:
        print(f'\nfsdp chaos: {broken}; seed {args.seed}; see {folder}', file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == '__main__':
    sys.exit(main())
