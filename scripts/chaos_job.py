"""A training job over several processes, to which scripts/chaos.py does harm."""
import json
import os
import signal
import socket
import subprocess
import time

OPTIONS = '--dim 32 --layers 2 --lr 1e-3 --context 32 --schedule constant'.split()
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

    started = []  # all jobs, so that none outlives the tool

    def __init__(self, tool, folder, steps, ranks=2, nodes=1, min_ranks=None, device='cpu', batch=8,
                 save_every=20):
        self.run, self.log = folder / 'run', folder / 'log'
        self.tool, self.ranks, self.nodes = tool, ranks, nodes
        self.train = [tool, 'train', '--data', str(folder.parent / 'text'), *OPTIONS, '--device',
                      device, '--batch', str(batch), '--steps', str(steps), '--run', str(self.run),
                      '--go-on', '--save-every', str(save_every), '--keep', '3']
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
        Job.started.append(self)
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
            if launcher.poll() is None:
                for pid in children_of(launcher.pid):
                    kill(pid)
                launcher.kill()
            launcher.wait()


def kill(pid, number=signal.SIGKILL):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
