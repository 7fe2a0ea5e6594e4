"""progress.py COMMAND...: runs ninja or ctest and shows one line of progress instead of hundreds.

On a terminal the line is rewritten in place; elsewhere a line is printed every half minute. All
output that is not progress is shown, also that of failures. A run of tests ends with a list of the
ten slowest tests. The exit code is that of the command.
"""

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

NINJA = re.compile(r"^\[(?P<done>\d+)/(?P<total>\d+)\] (?P<what>.*)")
# "  7/90 Test  #3: Mesh.Shape ....   Passed    0.31 sec"
CTEST = re.compile(
    r"^ *(?P<done>\d+)/(?P<total>\d+) Test +#\d+: (?P<what>.+?) \.*(?P<result>   Passed|\*\*\*.+?) +(?P<seconds>[\d.]+) sec"
)
CTEST_NOISE = re.compile(r"^(Test project |Internal ctest| +Start +\d+: )")
CTEST_SUMMARY = re.compile(r"^\d+% tests passed")
GOOD_RESULTS = ("Passed", "***Skipped")
SECONDS_BETWEEN_LINES = 30
SHARE_BEFORE_A_GUESS = 0.2  # an earlier guess would be too high: the slowest tests come first
PLANNED_SHARE_BEFORE_A_GUESS = 0.03
NUM_SLOWEST = 10

# How long ninja's steps take, by a part of their name, relative to a link. A precompiled header
# counts most, because everything else waits for it.
COSTS = (("cmake_pch", 150), ("Unity/unity_", 50), ("Building", 10), ("", 1))


def cost(what):
    return next(cost for part, cost in COSTS if part in what)


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class Line:
    """The line of progress."""

    def __init__(self, out, is_terminal, costs):
        self.out = out
        self.is_terminal = is_terminal
        self.costs = costs  # of all steps; empty if they are not known in advance
        self.done, self.total, self.what = 0, len(costs), ""
        self.done_cost = 0
        self.began = self.printed = time.monotonic()
        self.on_screen = False

    def advance(self, done, total, what):
        self.done, self.total, self.what = done, total, what
        self.done_cost += cost(what) if done else 0
        self.show()

    def show(self):
        """Shows the line. Call it also while no step ends, to update the time."""
        now = time.monotonic()
        if not self.is_terminal and now - self.printed < SECONDS_BETWEEN_LINES:
            return
        self.printed = now
        text = self.text(now - self.began)
        if self.is_terminal:
            name = os.path.basename(self.what.split()[-1]) if self.what.strip() else ""
            width = shutil.get_terminal_size().columns - 1
            self.out.write(f"\r\033[K{(text + (name and ': ' + name))[:width]}")
            self.on_screen = True
        else:
            self.out.write(text + "\n")
        self.out.flush()

    def text(self, spent):
        text = f"{self.done} of {self.total or '?'} done in {clock(spent)}"
        if not self.done:
            return text
        # If the number of steps has changed, all steps are assumed to take the same time.
        is_planned = len(self.costs) == self.total
        share = self.done_cost / sum(self.costs) if is_planned else self.done / self.total
        if share < (PLANNED_SHARE_BEFORE_A_GUESS if is_planned else SHARE_BEFORE_A_GUESS):
            return text
        return f"{text}, about {clock(max(0, spent / share - spent))} left"

    def clear(self):
        if self.on_screen:
            self.out.write("\r\033[K")
            self.on_screen = False


def watch_build(lines, out, line):
    """Copies `lines` to `out`, but shows lines of progress in the one line. A None in `lines` means
    that a second has passed."""
    for text in lines:
        found = text is not None and NINJA.match(text)
        if text is None:
            line.show()
        elif text.startswith("ninja: Entering directory"):
            continue
        elif found:
            line.advance(int(found["done"]), int(found["total"]), found["what"])
        else:
            line.clear()
            out.write(text + "\n")
            out.flush()
    line.clear()


def watch_tests(lines, out, line):
    """The same for the lines of ctest. Lists the slowest tests before its summary."""
    times = []
    for text in lines:
        if text is None:
            line.show()
            continue
        found = CTEST.match(text)
        if found:
            times.append((float(found["seconds"]), found["what"]))
            if found["result"].strip() in GOOD_RESULTS:
                line.advance(int(found["done"]), int(found["total"]), found["what"])
                continue
        if CTEST_NOISE.match(text):
            continue
        line.clear()
        if CTEST_SUMMARY.match(text):
            out.write("The slowest tests:\n")
            for seconds, name in sorted(times, reverse=True)[:NUM_SLOWEST]:
                out.write(f"{seconds:8.1f} s  {name}\n")
            out.write("\n")
        out.write(text + "\n")
        out.flush()
    line.clear()


def lines_and_seconds(stream):
    """The lines of a stream, and a None for every second without a line."""
    lines = queue.Queue()

    def read():
        for line in stream:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=1)
        except queue.Empty:
            yield None
            continue
        if not line:
            return
        yield line.rstrip("\n")


def planned_costs(command):
    """The costs of the steps that ninja is going to run."""
    plan = subprocess.run([*command, "-n"], capture_output=True, text=True, errors="replace").stdout
    return [cost(found["what"]) for found in map(NINJA.match, plan.splitlines()) if found]


def main(command):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command gets the signal, too, and ends
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    sys.stdout.reconfigure(errors="replace")
    os.environ["NINJA_STATUS"] = "[%f/%t] "
    is_build = os.path.basename(command[0]) == "ninja"
    line = Line(sys.stdout, sys.stdout.isatty(), planned_costs(command) if is_build else [])
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        (watch_build if is_build else watch_tests)(lines_and_seconds(child.stdout), sys.stdout, line)
        code = child.wait()
    except BrokenPipeError:  # nobody reads the output any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    finally:
        child.terminate()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(sys.argv[1:])
