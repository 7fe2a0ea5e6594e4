"""progress.py COMMAND...: runs ninja or ctest and shows one line of progress instead of hundreds.

On a terminal the line is rewritten in place; elsewhere one is printed every half minute. What
failed is shown whole, and so is everything that is not progress. A run of tests ends with the
ten slowest. Exits as the command does.
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
    r"^ *(?P<done>\d+)/(?P<total>\d+) Test +#\d+: (?P<what>\S+) \.*(?P<result>.*?) +(?P<seconds>[\d.]+) sec"
)
CTEST_NOISE = re.compile(r"^(Test project |Internal ctest| +Start +\d+: )")
CTEST_SUMMARY = re.compile(r"^\d+% tests passed")
GOOD_RESULTS = ("Passed", "***Skipped")
SECONDS_BETWEEN_LINES = 30
SECONDS_BEFORE_A_GUESS = 5
NUM_SLOWEST = 10

# How long ninja's steps take, by what they are called: a link is one, a file ten.
COSTS = (("cmake_pch", 50), ("Unity/unity_", 50), ("Building", 10), ("", 1))


def cost(what):
    return next(cost for part, cost in COSTS if part in what)


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class Line:
    """The line of progress."""

    def __init__(self, out, is_terminal, total_cost):
        self.out = out
        self.is_terminal = is_terminal
        self.total_cost = total_cost  # of all steps; 0: each is taken to last as long
        self.done = self.total = self.done_cost = 0
        self.what = ""
        self.began = self.printed = time.monotonic()
        self.on_screen = False

    def advance(self, done, total, what):
        self.done, self.total, self.what = done, total, what
        self.done_cost += cost(what)
        self.show()

    def show(self):
        """Also to be called while nothing ends: time goes on."""
        done, total, what = self.done, self.total, self.what
        now = time.monotonic()
        too_soon = not self.is_terminal and now - self.printed < SECONDS_BETWEEN_LINES
        if too_soon or not total:
            return
        self.printed = now
        spent = now - self.began
        text = f"{done} of {total} done in {clock(spent)}"
        if spent > SECONDS_BEFORE_A_GUESS and done:
            share = self.done_cost / self.total_cost if self.total_cost else done / total
            text += f", about {clock(spent / share - spent)} left"
        if self.is_terminal:
            name = os.path.basename(what.split()[-1]) if what.strip() else ""
            width = shutil.get_terminal_size().columns - 1
            self.out.write(f"\r\033[K{f'{text}: {name}'[:width]}")
            self.on_screen = True
        else:
            self.out.write(text + "\n")
        self.out.flush()

    def clear(self):
        if self.on_screen:
            self.out.write("\r\033[K")
            self.on_screen = False


def watch(lines, out, is_terminal, total_cost=0):
    """Copies `lines` to `out`, with those that tell progress made into one. A None among them
    says that a second has passed."""
    line = Line(out, is_terminal, total_cost)
    times = []  # of tests
    for text in lines:
        if text is None:
            line.show()
            continue
        text = text.rstrip("\n")
        found = NINJA.match(text) or CTEST.match(text)
        if found:
            values = found.groupdict()
            if "seconds" in values:
                times.append((float(values["seconds"]), values["what"]))
            if values.get("result", "Passed").strip() in GOOD_RESULTS:
                line.advance(int(values["done"]), int(values["total"]), values["what"])
                continue
        if CTEST_NOISE.match(text):
            continue
        line.clear()
        if CTEST_SUMMARY.match(text):
            out.write("The slowest:\n")
            for seconds, name in sorted(times, reverse=True)[:NUM_SLOWEST]:
                out.write(f"{seconds:8.1f} s  {name}\n")
            out.write("\n")
        out.write(text + "\n")
        out.flush()
    line.clear()


def planned_cost(command):
    """Of all that ninja is going to do; 0 where the command is not ninja."""
    if os.path.basename(command[0]) != "ninja":
        return 0
    plan = subprocess.run([*command, "-n"], capture_output=True, text=True).stdout
    return sum(cost(found["what"]) for found in map(NINJA.match, plan.splitlines()) if found)


def lines_and_seconds(stream):
    """The lines of a stream, and a None for every second in which there is none."""
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
        yield line


def main(command):
    total_cost = planned_cost(command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command hears it too, and ends
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    watch(lines_and_seconds(child.stdout), sys.stdout, sys.stdout.isatty(), total_cost)
    code = child.wait()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(sys.argv[1:])
