#!/usr/bin/env python3
"""`./fsdp chaos`: faults at random moments of real training jobs.

Each round starts `fsdp train` over several processes, does one kind of harm to it, lets it go on,
and compares it with an undisturbed run: every loss must be the same to the last bit, or within
rounding if the number of ranks changed on the way. The seed decides the order of the faults and the
moments. docs/reliability.md says what is promised for each fault.
"""
import argparse
import concurrent.futures
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from chaos_faults import ENDS_BY_ITSELF, FAULTS, HARMLESS, node_is_lost
from chaos_job import Broken, Job, expect, kill, metrics, own_address


def compare(job, reference):
    losses = {line['step']: line['loss'] for line in metrics(job.run)}
    expect(len(losses) == len(reference), f'{len(losses)} steps instead of {len(reference)}')
    expect(all(loss is not None for loss in losses.values()), 'a loss is not a number')
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
        struck = fault(job, draw) is not False
        if fault in ENDS_BY_ITSELF:
            expect(job.wait() == [0], 'the job does not go on by itself')
        if fault in HARMLESS:
            expect(not metrics(job.run, 'lost_steps'), 'steps were lost')
        job.finish()
        worst = compare(job, reference)
    finally:
        job.kill_all()
    print(f'{number:5}  {fault.__name__:22} largest difference {worst:.1e}, '
          f'{time.monotonic() - start:.1f} s{"" if struck else ", but it came too late"}', flush=True)
    shutil.rmtree(own)
    return struck


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


def sizes_of(job):
    """The largest memory in KiB, number of threads and number of open files of a rank. None if not
    every rank runs."""
    sizes = []
    for pid in job.rank_pids():
        try:
            status = pathlib.Path(f'/proc/{pid}/status').read_text()
            sizes.append([int(re.search(rf'{key}:\s+(\d+)', status)[1])
                          for key in ('VmRSS', 'Threads')] + [len(os.listdir(f'/proc/{pid}/fd'))])
        except (OSError, TypeError):
            pass  # the process ends
    return [max(column) for column in zip(*sizes)] if len(sizes) == job.ranks else None


def expect_same_tensors(job, device):
    """Prints the bytes of tensors from the tenth step on. At the end of a step on a GPU, they are
    always the same."""
    memory = [line['memory'] for line in metrics(job.run)][10:]
    for key in ('allocated', 'peak'):
        sizes = {line[key] for line in memory}
        print(f'tensors, {key}: {min(sizes)} to {max(sizes)} bytes')
        expect(key == 'peak' or device == 'cpu' or len(sizes) == 1,
               'the memory of tensors has changed')


def soak(args, folder):
    """One long run that saves all the time. No process may grow by more than 2 %. Then the job is
    killed, and the run goes on with three ranks."""
    write_text(folder)
    (folder / 'long').mkdir()
    save_every = max(20, args.soak // 100)
    options = {'device': args.device, 'batch': 24, 'save_every': save_every}
    job = Job(args.tool, folder / 'long', args.soak, ranks=args.ranks, **options).start()
    samples = []
    while job.is_running() and job.num_steps() < args.soak:  # the end loads more code
        samples += filter(None, [sizes_of(job)])
        time.sleep(0.5)
    expect(job.wait() == [0], 'the job has failed')
    expect(len(samples) >= 40, 'the run is too short to see growth: more --soak')
    quarter = len(samples) // 4
    early, late = ([max(column) for column in zip(*part)]
                   for part in (samples[quarter:2 * quarter], samples[-quarter:]))
    print(f'{args.soak} steps, {args.soak // save_every} checkpoints; the largest process in the '
          f'second and in the last quarter of the run: {early[0]} and {late[0]} KiB, {early[1]} and '
          f'{late[1]} threads, {early[2]} and {late[2]} open files', flush=True)
    expect(late[0] <= 1.02 * early[0] and late[1] <= early[1] and late[2] <= early[2] + 2,
           'a process has grown')
    expect_same_tensors(job, args.device)
    more = args.soak + 2 * save_every
    job = Job(args.tool, folder / 'long', more, ranks=args.ranks, **options).start()
    job.wait_for_step(args.soak + save_every)
    expect(job.is_running(), 'the job ended before it was killed')
    job.kill_all()
    job = Job(args.tool, folder / 'long', more, ranks=3, **options).start()
    expect(job.wait() == [0], 'the run does not go on with 3 ranks')
    print(f'killed after step {args.soak + save_every}, and gone on with 3 ranks to step {more}')


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
    parser.add_argument('--ranks', type=int, default=2, help='of a --soak; a divisor of 24 [2]')
    parser.add_argument('--device', choices=['cpu', 'cuda'], default='cpu', help='of a --soak [cpu]')
    parser.add_argument('--pause', type=float, default=6,
                        help='most seconds between two kills [6]')
    parser.add_argument('--faults', help='only those whose name contains this')
    args = parser.parse_args()
    if not any((args.faults or '') in fault.__name__ for fault in FAULTS):
        parser.error(f'--faults {args.faults}: there are {", ".join(f.__name__ for f in FAULTS)}')
    for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'):
        os.environ.pop(name, None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and not without ending its jobs
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
                tries[fault.__name__] += one_round(number, fault, args, folder, reference)
            print('\n| fault | survived |\n|---|---|')
            for name, count in sorted(tries.items()):
                print(f'| {name.replace("_", " ")} | {count} of {count} |')
    except Broken as broken:
        print(f'\nfsdp chaos: {broken}; seed {args.seed}; see {folder}', file=sys.stderr)
        return 1
    finally:
        for job in Job.started:
            job.kill_all()
    shutil.rmtree(folder)
    return 0


if __name__ == '__main__':
    sys.exit(main())
