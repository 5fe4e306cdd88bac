# Two sides timed in turns: the shared part of this folder's comparisons.
import json
import re
import resource
import statistics
import time

SHORT_SECONDS, LONG_SECONDS = 0.01, 0.3  # twice as many samples, and at most three


def sample(call, threads, clock=time.thread_time):
    """(seconds, clean) of one call; those of one thread by `clock`."""
    if threads == 1:
        start = clock()
        call()
        return clock() - start, True
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == switches


def clean_sample(call, threads, clock, tries=12):
    """Seconds of a clean call, or None after so many tries."""
    for attempt in range(tries):
        if attempt:
            time.sleep(0.03)
        seconds, clean = sample(call, threads, clock)
        if clean:
            return seconds
    return None


def timed(name, ours, theirs, threads, rounds, our_error, their_error, clock=time.thread_time, switch=None):
    """Both in turns: a dict of one line. `switch`, a function of no arguments, is called after each side, untimed."""
    switch = switch or (lambda: None)

    def turn(call, take):
        taken = take(call, threads, clock)
        switch()
        return taken

    seconds = max(turn(call, sample)[0] for call in (ours, theirs))
    if seconds > LONG_SECONDS:
        rounds = min(rounds, 3)
    elif seconds < SHORT_SECONDS:
        rounds = 2 * rounds + 1
    pairs, rejected = [], 0
    for _ in range(rounds):
        a, b = (turn(call, clean_sample) for call in (ours, theirs))
        if a is None or b is None:
            rejected += 1
        else:
            pairs.append((a, b))
    return {"name": name, "samples": len(pairs), "rejected": rejected, **summary(pairs, "torch_seconds"),
            "heed_error": our_error, "torch_error": their_error}


def summary(pairs, other="peer_seconds"):
    """Medians of (heed's, the other's) seconds, and median and quartiles of their ratio; None without pairs."""
    if not pairs:
        return dict.fromkeys(("heed_seconds", other, "ratio", "q1", "q3"))
    ratios = sorted(b / a for a, b in pairs)
    middle = len(ratios) // 2
    return {"heed_seconds": statistics.median(a for a, _ in pairs), other: statistics.median(b for _, b in pairs),
            "ratio": statistics.median(ratios), "q1": statistics.median(ratios[:middle] or ratios),
            "q3": statistics.median(ratios[middle:])}


def timed_beside_peer(name, ours, theirs, threads, rounds, difference, goal):
    """A dict of a line whose results differ by `difference`; the CPU time of the process counts for one thread."""
    row = timed(name, ours, theirs, threads, rounds, difference, difference, time.process_time)
    row = {key.replace("torch", "peer"): value for key, value in row.items() if not key.endswith("_error")}
    return {**row, "difference": difference, "goal": goal}


def cpu_name():
    """The CPU as the system calls it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            facts = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", file.read(), re.MULTILINE))
        return f"{facts['model name']} (family {facts['cpu family']} model {facts['model']})"
    except (OSError, KeyError):
        return "unknown CPU"


def show_with_goal(row, width):
    """One line of text of a row that has a goal, or none, or is left out: peers other than PyTorch."""
    name = f"{row['name']:<{width}}"
    if "skipped" in row:
        return f"{name} left out: {row['skipped']}"
    if row["ratio"] is None:
        return f"{name} noisy"
    goal = f">= {row['goal']}" if row["goal"] else ""
    verdict = "" if not row["goal"] else "ok" if row["ratio"] >= row["goal"] else "MISSED"
    return (f"{name} {1e3 * row['heed_seconds']:>9.2f} ms {1e3 * row['peer_seconds']:>9.2f} ms {row['ratio']:>7.2f}x  "
            f"{row['q1']:.2f} - {row['q3']:.2f}  {goal:>5} {verdict}")


def report(installed, title, width, rows, options):
    """Rows as they come, as text or as one JSON document at the end; `installed` has the CPU and versions by name."""
    if options.json:
        print(json.dumps({**installed, "tokens": options.tokens, "lines": list(rows)}, indent=2))
        return
    print(", ".join(f"{name} {version}" if name != "cpu" else version for name, version in installed.items()))
    print(f"{title:<{width}} {'heed':>12} {'peer':>12} {'ratio':>8}  quartiles    goal", flush=True)
    for row in rows:
        print(show_with_goal(row, width), flush=True)


def add_arguments(parser, rounds, threads="1"):
    """Adds the arguments that all comparisons take."""
    parser.add_argument("filter", nargs="?", default=".", help="regular expression of the lines to measure")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--threads", default=threads, help="thread counts")
    parser.add_argument("--rounds", type=int, default=rounds, help="samples of each side")


def chosen_lines(parser, options, lines):
    """The members of lines(threads) whose name, their first field, matches the filter."""
    try:
        threads = [int(word) for word in options.threads.split(",")]
        return [line for line in lines(threads) if re.search(options.filter, line[0])]
    except (ValueError, re.error) as error:
        parser.error(str(error))
