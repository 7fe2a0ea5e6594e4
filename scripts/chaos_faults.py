"""The faults of scripts/chaos.py. Each does its harm to a job, and returns False if it came too late for that."""
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time

from chaos_job import Broken, IN_TIME, OPTIONS, PATIENCE, expect, kill


def rank_dies(job, draw, numbers=(signal.SIGKILL,)):
    struck = False
    for _ in range(draw.randint(1, 3)):
        job.wait_for_step(job.num_steps() + draw.randint(1, 15))
        time.sleep(draw.random() / 2)
        pids = job.rank_pids()
        if pids:
            kill(draw.choice(pids), draw.choice(numbers))
            struck = True
    return struck


def rank_crashes(job, draw):
    return rank_dies(job, draw, (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE))


def rank_is_slow(job, draw):
    struck = False
    for _ in range(3):
        pids = job.rank_pids()
        if pids:
            pid = draw.choice(pids)
            kill(pid, signal.SIGSTOP)
            time.sleep(draw.uniform(0.1, 2))
            kill(pid, signal.SIGCONT)
            struck = True
    return struck


def rank_hangs(job, draw):
    pids = job.rank_pids()
    if not pids:
        return False
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
        time.sleep(0.001)
    pids = job.rank_pids()
    for pid in pids:
        kill(pid)
    return bool(pids)


def newest_is_bad(job, spoil):
    """Ends the job, spoils its newest checkpoint, and expects that it goes on from an older one."""
    job.end_in_time(signal.SIGTERM)
    saved = sorted((job.run / 'checkpoints').glob('step_????????'))
    if len(saved) < 2:
        return False
    spoil(saved[-1])
    job.start()
    expect(job.wait() == [0], 'a bad checkpoint ends the job')
    said = re.search('the run goes on from|newer checkpoint is skipped', job.log.read_text())
    expect(said, 'nobody speaks of the bad checkpoint')
    return True


def flip_a_bit(path, draw):
    data = bytearray(path.read_bytes())
    data[-draw.randint(1, len(data) // 2)] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def checkpoint_is_damaged(job, draw):
    return newest_is_bad(job, lambda saved: flip_a_bit(draw.choice(list(saved.glob('rank_*'))), draw))


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def checkpoint_is_forged(job, draw):
    """The manifest says that a piece lies elsewhere, and has the right checksum of its own."""
    def forge(saved):
        path = saved / 'manifest.json'
        _, rest = path.read_text().split(',', 1)
        place = draw.choice(list(re.finditer(r'"offset":(\d+)', rest)))
        rest = f'{rest[:place.start(1)]}{int(place[1]) + 4}{rest[place.end(1):]}'
        path.write_text(f'{{"crc32c":"{crc32c(rest.encode()):08x}",{rest}')
    return newest_is_bad(job, forge)


def checkpoint_is_foreign(job, draw):
    def become_foreign(saved):
        other = saved.with_name('other')
        ends_with(job, [job.tool, 'convert', saved, other], 0, 'wrote')
        shutil.rmtree(saved)
        other.rename(saved)
    return newest_is_bad(job, become_foreign)


def disk_is_full(job, draw):
    """The job goes on where no file can grow to the size of a checkpoint."""
    job.end_in_time(signal.SIGTERM)
    if job.num_steps() > 120:
        return False  # it may have nothing to save any more
    words = shlex.join([job.tool, 'run', '-n', '2', '--', *job.train])
    ends_with(job, ['bash', '-c', f"trap '' XFSZ; ulimit -f 64; {words}"], 4, 'cannot ')
    return True


def with_shim(job, **environment):
    """Starts the job again with a library that changes what the system does."""
    if not job.rank_pids():
        return False
    job.end_in_time(signal.SIGTERM)
    shim = pathlib.Path(job.tool).with_name('fault_shim.so')
    expect(shim.exists(), f'{shim.name} is missing: ./fsdp build fault_shim')
    os.environ.update(LD_PRELOAD=str(shim), **environment)
    try:
        job.start()
    finally:
        for name in ('LD_PRELOAD', *environment):
            del os.environ[name]
    expect(job.wait() == [0], 'the job has failed')
    return True


def disk_is_slow(job, draw):
    return with_shim(job, FSDP_TEST_SYNC_MS=str(draw.randint(50, 500)))


def clock_jumps(job, draw):
    return with_shim(job, FSDP_TEST_CLOCK_JUMPS='1')


# These harm a job of their own, beside the other one.


def ends_with(job, words, code, text):
    """Expects that a command ends by itself, with this exit code and text."""
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE,
                               cwd=job.run.parent)
    except subprocess.TimeoutExpired:
        raise Broken(f'{words} does not end') from None
    said = ended.stdout + ended.stderr
    expect(ended.returncode == code and re.search(text, said), f'{ended.returncode}: {said}')


def other_run(job, *options):
    return [job.tool, 'train', '--data', str(job.run.parent.parent / 'text'), *OPTIONS, '--no-save',
            *options]


def options_differ(job, draw):
    name = draw.choice(['lr', 'seed', 'clip', 'weight-decay', 'steps', 'batch'])
    words = shlex.join(other_run(job, f'--{name}'))
    ends_with(job, [job.tool, 'run', '-n', '2', '--', 'bash', '-c', f'{words} $((8 + 2 * RANK))'],
              2, f'--{name}')


def gradient_is_not_finite(job, draw):
    words = other_run(job, '--lr', '1e30', '--clip', '0', '--steps', '50')
    ends_with(job, [job.tool, 'run', '-n', '2', '--', *words], 5, 'not finite')


def memory_is_short(job, draw):
    ends_with(job, [job.tool, 'train', '--model', '70b', '--ranks', '2', '--no-save'], 2, 'free')


def port_is_taken(job, draw):
    with socket.socket() as stranger:
        stranger.bind(('127.0.0.1', 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        words = [job.tool, 'run', '-n', '2', '--master', f'127.0.0.1:{port}', '--']
        ends_with(job, [*words, *other_run(job, '--steps', '5')], 3, str(port))


def folder_is_in_use(job, draw):
    if job.num_steps() > 100:
        return False  # it may end while the second run starts
    ends_with(job, [*job.train, '--ranks', '1'], 4, 'another run writes to')
    return True


def strangers_connect(job, draw):
    sockets = set()
    for pid in [*job.rank_pids(), *(launcher.pid for launcher in job.launchers)]:
        for entry in pathlib.Path(f'/proc/{pid}/fd').glob('*'):
            try:
                sockets.add(os.readlink(entry).removeprefix('socket:[').removesuffix(']'))
            except OSError:
                pass  # it is closed already
    lines = [line.split() for line in pathlib.Path('/proc/net/tcp').read_text().splitlines()]
    ports = [int(line[1].split(':')[1], 16) for line in lines
             if line[3] == '0A' and line[9] in sockets]
    for port in ports:
        with socket.socket() as stranger:
            stranger.settimeout(0.2)
            try:
                stranger.connect(('127.0.0.1', port))
                stranger.send(draw.randbytes(draw.randint(1, 400)))
            except OSError:
                pass
    return bool(ports)


def node_is_lost(job, draw):
    if not job.is_running():
        return False
    kill(job.launchers[1].pid)
    job.launchers[1].wait()
    time.sleep(draw.uniform(0, 9))
    if job.launchers[0].poll() is None:
        job.launchers[1] = job.start_node(1)


FAULTS = [rank_dies, rank_crashes, rank_is_slow, rank_hangs, launcher_dies, person_interrupts,
          save_is_interrupted, checkpoint_is_damaged, checkpoint_is_forged, checkpoint_is_foreign,
          disk_is_full, disk_is_slow, clock_jumps, options_differ, gradient_is_not_finite,
          memory_is_short, port_is_taken, folder_is_in_use, strangers_connect, node_is_lost]
HARMLESS = [rank_is_slow, options_differ, gradient_is_not_finite, memory_is_short, port_is_taken,
            folder_is_in_use, strangers_connect]
ENDS_BY_ITSELF = [*HARMLESS, rank_dies, rank_crashes, save_is_interrupted]
