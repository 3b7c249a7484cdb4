"""Tests of profiling.py: exact numbers from fake clocks, devices and traces; real runs only where order decides."""
import gzip
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common import profiling
from common.profiling import (DEVICE_PEAKS, Peak, compare, cost, dump, markdown_table, measure, measure_cpu_peak,
                              op_table, peak, provenance, ratio, read_trace, roofline)

ROOT = Path(__file__).resolve().parents[1]


# Timing ----------------------------------------------------------------------------------
def test_measure_keeps_compilation_out_of_the_calls():
    traces = []

    def f(x):
        traces.append(time.sleep(0.1))
        return x + 1

    timing = measure(f, lambda: (jnp.ones(8),), n=4, warmup=1)
    assert timing.compile_s >= 0.1 and len(traces) == 1  # traced once, inside compile_s
    assert timing.n == 4 and 0 < timing.median_s <= timing.p90_s and timing.first_s > 0


def test_measure_makes_fresh_arguments_and_donates_them():
    made = []

    def make_args():
        made.append(jnp.full(1024, len(made), jnp.float32))
        return made[-1], 1.0

    measure(jax.jit(lambda x, y: x + y, donate_argnums=0), make_args, n=5, warmup=2)
    assert len(made) == 1 + 1 + 2 + 5  # to compile, first call, warm-up, timed
    assert [x.is_deleted() for x in made] == [False] + 8 * [True]


def test_measure_waits_for_a_slow_computation():
    def slow(x):
        time.sleep(0.05)
        return x

    def f(x):
        return x, jax.pure_callback(slow, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    timing = measure(f, lambda: (jnp.ones(8),), n=3, warmup=0)
    assert timing.first_s >= 0.05 and timing.median_s >= 0.05


def test_measure_blocks_on_every_output(monkeypatch):
    clock = [0.0]

    class Output:  # ready one second after it is waited for
        def block_until_ready(self):
            clock[0] += 1

    f = SimpleNamespace(lower=lambda: SimpleNamespace(compile=lambda: lambda: (Output(), {"deep": [Output(), 3]})))
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert measure(f, lambda: (), n=3).median_s == 2


def test_measure_clocks_the_call_alone(monkeypatch):
    clock = [0.0]

    def advance(seconds, x):
        clock[0] += seconds
        return x

    def make_args():
        return (advance(1000, np.float32(0)),)

    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    seconds = iter([9, 5, 1, 2, 3])  # first call, warm-up, three timed calls
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    timing = measure(lambda x: jax.pure_callback(lambda x: advance(next(seconds), x), scalar, x), make_args, 3, 1)
    assert (timing.first_s, timing.median_s, timing.n) == (9, 2, 3) and timing.p90_s == pytest.approx(2.8)


def test_measure_refuses_no_calls():
    with pytest.raises(ValueError, match="n >= 1"):
        measure(jnp.sin, lambda: (1.0,), n=0)


# Comparison ------------------------------------------------------------------------------
WORKER = """
import os, sys, time
print("chatter with a newline, then without", end="")
from common.profiling import serve
name, log, fail = sys.argv[1], sys.argv[2], int(sys.argv[3])
def note(text):
    with open(log, "a") as file:
        file.write(text)
open(name + ".pid", "w").write(str(os.getpid()))
note("(" + name)
time.sleep(0.1)
note(")")
calls = 0
def run_once():
    global calls
    calls += 1
    note(name)
    print('{"seconds": -1}')
    os.write(1, b"chatter past Python")
    if calls == fail:
        raise ArithmeticError("planted failure")
    return {"seconds": calls * float(os.environ.get("SCALE", 1)), "calls": calls}
serve(run_once, pid=os.getpid())
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Command line of a worker in an empty folder: worker(name, fail) fails in its fail-th run (0: never)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    Path("worker.py").write_text(WORKER)
    return lambda name, fail=0: [sys.executable, "worker.py", name, "log", str(fail)]


def test_compare_takes_turns_among_chatter(worker):
    result = compare({name: worker(name) for name in "ABC"}, rounds=3, env={"B": {"SCALE": "0.5"}}, timeout_s=60)
    assert Path("log").read_text() == "(A)(B)(C)ABCABCABC"
    assert result["sides"]["A"]["seconds"] == {"median": 2, "min": 1, "max": 3, "values": [1, 2, 3]}
    assert result["sides"]["B"]["seconds"]["values"] == [0.5, 1, 1.5]
    assert result["rounds"] == 3 and {"load_before", "load_after"} <= set(result)
    assert len({side["pid"] for side in result["provenance"].values()}) == 3
    assert ratio(result, "seconds", "B", "A", higher_is_better=False) == 2
    assert ratio(result, "seconds", "B", "A") == 0.5
    json.dumps(result)


def test_compare_starts_a_new_process_for_each_run_when_asked(worker):
    result = compare({name: worker(name) for name in "AB"}, rounds=2, timeout_s=60, fresh=True)
    assert Path("log").read_text() == "(A)A(B)B(A)A(B)B"
    assert result["sides"]["A"]["seconds"]["values"] == [1, 1]  # a worker's first run each time
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("A.pid").read_text()), 0)


def test_compare_reports_a_dead_worker_and_ends_the_others(worker):
    with pytest.raises(RuntimeError, match=r"side 'B' ended with exit status 1(?s:.*)planted failure"):
        compare({"A": worker("A"), "B": worker("B", fail=2)}, rounds=3, timeout_s=60)
    assert Path("log").read_text() == "(A)(B)ABAB"
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("A.pid").read_text()), 0)


def test_compare_reports_failure_in_set_up_and_silence():
    with pytest.raises(RuntimeError, match="side 'A' ended with exit status 3(?s:.*)no such data"):
        compare({"A": [sys.executable, "-c", "import sys; print('no such data', file=sys.stderr); sys.exit(3)"]})
    with pytest.raises(RuntimeError, match="side 'B' did not answer within 0.2 s"):
        compare({"B": [sys.executable, "-c", "import time; time.sleep(60)"]}, timeout_s=0.2)


def test_compare_refuses_bad_input():
    with pytest.raises(ValueError, match="rounds >= 1"):
        compare({"A": ["true"]}, rounds=0)
    with pytest.raises(ValueError, match="'jaxx'"):
        compare({"jax": ["true"]}, env={"jaxx": {}})


# Peaks and rooflines -----------------------------------------------------------------------
H100 = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")  # 989e12 FLOP/s in bfloat16, 3.35e12 bytes/s: ridge 295
UNKNOWN = SimpleNamespace(device_kind="NVIDIA H100 PCIe")


def test_roofline_by_hand():
    memory = roofline(2e12, 1e10, 0.01, "bfloat16", H100)
    assert (memory.intensity, memory.flops_per_s, memory.bytes_per_s, memory.bound) == (200, 2e14, 1e12, "memory")
    assert memory.attainable_flops_per_s == pytest.approx(200 * 3.35e12)
    assert memory.fraction_of_attainable == pytest.approx(2e14 / 6.7e14)
    assert memory.fraction_of_peak == pytest.approx(2e14 / 989e12)

    compute = roofline(4e12, 1e10, 0.01, jnp.bfloat16, H100)  # intensity 400
    assert compute.bound == "compute" and compute.attainable_flops_per_s == 989e12
    assert compute.fraction_of_attainable == compute.fraction_of_peak == pytest.approx(4e14 / 989e12)

    copy = roofline(0, 3.35e10, 0.02, "bfloat16", H100)  # no FLOPs: the bandwidth's fraction
    assert (copy.bound, copy.fraction_of_peak) == ("memory", 0) and copy.fraction_of_attainable == pytest.approx(0.5)


@pytest.mark.parametrize("dtype, device", [
    ("bfloat16", UNKNOWN), ("float64", H100), ("float32", SimpleNamespace(device_kind="TPU v5 lite"))])
def test_unknown_peaks_are_not_guessed(dtype, device):
    line = roofline(2e12, 1e10, 0.01, dtype, device)
    assert (line.intensity, line.flops_per_s, line.bytes_per_s, line.bound) == (200, 2e14, 1e12, "unknown")
    assert {line.attainable_flops_per_s, line.fraction_of_attainable, line.fraction_of_peak} == {None}


def test_peak_table():
    assert peak(UNKNOWN) is None
    assert peak(H100, "float32") == Peak(67e12, 3.35e12)
    assert peak(SimpleNamespace(device_kind="Tesla T4"), "bfloat16") == Peak(None, 320e9)
    assert all(set(row) == {"bfloat16", "float32", "bytes_per_s"} for row in DEVICE_PEAKS.values())


@pytest.mark.parametrize("bad", [(-1, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, float("nan"))])
def test_roofline_refuses(bad):
    with pytest.raises(ValueError, match="flops >= 0, bytes > 0, seconds > 0"):
        roofline(*bad, device=H100)


def test_cpu_peak_counts_and_is_measured_once(monkeypatch):
    calls = []

    def half_a_second(run, seconds):
        calls.append(run())
        return 0.5

    monkeypatch.setattr(profiling, "_fastest", half_a_second)
    profiling._cpu_peak.cache_clear()
    try:
        assert peak(jax.devices("cpu")[0]) == Peak(2 * 2048**3 / 0.5, 2 * 2**28 / 0.5)
        assert peak(jax.devices("cpu")[0], jnp.float32) == peak(dtype="float32", device=jax.devices("cpu")[0])
        assert len(calls) == 2  # matmul and stream, once for all of these
        assert measure_cpu_peak("float64").flops_per_s == 2 * 2048**3 / 0.5 and calls[2].dtype == "float64"
    finally:
        profiling._cpu_peak.cache_clear()  # these are no peaks


def test_fastest_leaves_out_the_first_run(monkeypatch):
    clock, seconds = [0.0], iter([0.5, 3, 2, 4, 2.5, 9])

    def run():
        clock[0] += next(seconds)

    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert profiling._fastest(run, seconds=10) == 2 and next(seconds) == 9


# What the compiler made --------------------------------------------------------------------
def tanh_matmul(x, w):
    return jnp.tanh(x @ w) * 2 + 1


SHAPES = jax.ShapeDtypeStruct((128, 64), jnp.float32), jax.ShapeDtypeStruct((64, 32), jnp.float32)


def test_cost():
    matmul = cost(jax.jit(jnp.matmul).lower(*SHAPES).compile())
    assert matmul == {"flops": 2 * 128 * 64 * 32, "bytes": 4 * (128 * 64 + 64 * 32 + 128 * 32)}
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    loop = jax.jit(lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=5)[0]).lower(square).compile()
    assert 2 * 64**3 <= cost(loop)["flops"] < 2 * 2 * 64**3  # the body once, as the docstring warns
    assert cost(SimpleNamespace(cost_analysis=lambda: [{"bytes accessed": 8.0}])) == {"flops": 0, "bytes": 8}


def test_dump(tmp_path):
    paths = dump(jax.jit(tanh_matmul), *SHAPES, out=tmp_path / "new" / "folder")
    assert {key: path.name for key, path in paths.items()} == {
        "jaxpr": "jaxpr.txt", "stablehlo": "stablehlo.mlir",
        "hlo_optimised": "hlo_optimised.txt", "memory": "memory.json"}
    texts = {key: path.read_text() for key, path in paths.items()}
    assert "tanh" in texts["jaxpr"] and "stablehlo.tanh" in texts["stablehlo"] and "\nENTRY" in texts["hlo_optimised"]
    assert 'op_name="jit(tanh_matmul)/dot_general"' in texts["hlo_optimised"]
    assert json.loads(texts["memory"])["argument_size_in_bytes"] == 4 * (128 * 64 + 64 * 32)
    assert str(Path(__file__).parent) not in "".join(texts.values())


def test_op_table_names_the_fusion():
    compiled = jax.jit(lambda x, w: (tanh_matmul(x, w), x.sum())).lower(*SHAPES).compile()
    table = op_table(compiled)
    assert [row["bytes"] for row in table] == sorted((row["bytes"] for row in table), reverse=True)
    fusion = next(row for row in table if row["fusion"] == "kLoop")
    assert (fusion["opcode"], fusion["bytes"], fusion["shape"]) == ("fusion", 4 * 128 * 32, "f32[128,32]{1,0}")
    assert f"{fusion['calls']} (" in compiled.as_text() and fusion["op_name"].startswith("jit(")
    assert not {row["opcode"] for row in table} & {"parameter", "constant", "tuple"}
    assert op_table(compiled, top=1) == table[:1]


def test_op_table_reads_loops_and_tpu_layouts():
    text = """HloModule m

%body (p: f32[2]) -> f32[2] {
  ROOT %hidden = f32[1000]{0} negate(%p)
}

ENTRY %main (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  %while.1 = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, /*index=2*/token[]) while(%t), body=%body
  ROOT add.2 = s4[3]{0} add(p, p), metadata={op_name="jit(f)/add" stack_frame_id=1}
}

"""
    loop, add = op_table(SimpleNamespace(as_text=lambda: text))
    assert (loop["name"], loop["opcode"], loop["bytes"], loop["calls"]) == ("while.1", "while", 4 + 2 * 1024, "body")
    assert add == {"name": "add.2", "opcode": "add", "shape": "s4[3]{0}", "bytes": 2, "fusion": None, "calls": None,
                   "op_name": "jit(f)/add"}


@pytest.mark.parametrize("shape, size", [
    ("f32[]", 4), ("(f32[2,3]{1,0}, pred[])", 25), ("f8e4m3fn[10]", 10), ("c128[2]", 32), ("token[]", 0),
    ("f64[0,4]", 0)])
def test_shape_bytes(shape, size):
    assert profiling._shape_bytes(shape) == size


def test_markdown_table():
    rows = [{"name": "a|b", "ms": 1234.56}, {"name": "c", "ms": 0.0123456, "note": None}]
    assert markdown_table(rows).splitlines() == [
        "| name | ms | note |", "| --- | --- | --- |", r"| a\|b | 1235 |  |", "| c | 0.01235 |  |"]
    assert markdown_table(rows, ["ms"]).splitlines() == ["| ms |", "| --- |", "| 1235 |", "| 0.01235 |"]


# Traces ------------------------------------------------------------------------------------
def event(name, start_us, end_us, thread=1, **args):
    return {"ph": "X", "pid": 7, "tid": thread, "name": name, "ts": start_us, "dur": end_us - start_us, "args": args}


def op(name, start_us, end_us, thread=2):
    return event(name, start_us, end_us, thread, hlo_op=name)


def write_trace(folder, *events):
    folder = folder / "plugins" / "profile" / "2026_01_01"
    folder.mkdir(parents=True)
    with gzip.open(folder / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": [{"ph": "M", "name": "process_name"}, *events, {}]}, file)


def test_read_trace_by_hand(tmp_path):
    write_trace(
        tmp_path,
        event("train", 0, 1000, step_num="5"),
        event("$loop.py:1 step", 0, 1000), event("PjitFunction(f)", 10, 60),
        event("$api.py:1 block_until_ready", 80, 950),
        op("while.1", 100, 500), op("dot.2", 150, 250), op("dot.2", 300, 400), op("add.3", 200, 600, thread=3),
        event("ThunkExecutor::Execute (wait for completion)", 550, 700, thread=2),
        event("train", 2000, 2500, step_num="6"), op("dot.2", 1900, 1950), op("dot.2", 2100, 2600),
        event("train", 3000, 3100, thread=9))  # an annotation of the same name that is no step
    result = read_trace(tmp_path)
    first, second = result["per_step"]
    # busy 100..700; the rest is Python, but for 80..100 and 700..950, which it spends waiting
    assert first == {"step": 5, "wall_ms": 1.0, "busy_ms": 0.6, "gap_ms": 0.4, "host_ms": 0.13}
    assert second == {"step": 6, "wall_ms": 0.5, "busy_ms": 0.4, "gap_ms": 0.1, "host_ms": 0}  # ops cut at the end
    assert (result["steps"], result["wall_ms"], result["busy_ms"]) == (2, 0.75, 0.5)
    assert result["top_ops"] == [{"name": "dot.2", "total_ms": 0.7, "count": 3},
                                 {"name": "add.3", "total_ms": 0.4, "count": 1},
                                 {"name": "while.1", "total_ms": 0.2, "count": 1}]


@pytest.mark.parametrize("events, message", [
    (None, "nothing was profiled"), ([op("dot", 0, 1)], "no StepTraceAnnotation"),
    ([event("train", 0, 9, step_num="0"), op("dot", 10, 11)], "no XLA op inside its steps")])
def test_read_trace_names_the_folder(tmp_path, events, message):
    if events is not None:
        write_trace(tmp_path, *events)
    with pytest.raises(ValueError, match=message) as error:
        read_trace(tmp_path)
    assert str(tmp_path) in str(error.value)


TRACED = """
import sys
import jax, jax.numpy as jnp
from common.profiling import op_table, trace
step = jax.jit(lambda x, w: jnp.tanh(x @ w))
x, w = jnp.ones((256, 256)), jnp.ones((256, 256))
step(x, w).block_until_ready()
with trace(sys.argv[1]):
    for i in range(3):
        with jax.profiler.StepTraceAnnotation("train", step_num=i):
            step(x, w).block_until_ready()
print(*(row["name"] for row in op_table(step.lower(x, w).compile())))
"""


def test_trace_of_three_real_steps(tmp_path):
    """In a process of its own: JAX 0.10's profiler crashes in one that has loaded libtpu or torch before."""
    done = subprocess.run([sys.executable, "-c", TRACED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr
    result = read_trace(tmp_path)
    assert result["steps"] == 3 and [s["step"] for s in result["per_step"]] == [0, 1, 2]
    for s in result["per_step"]:
        assert 0 < s["busy_ms"] <= s["wall_ms"] and 0 <= s["host_ms"] <= s["gap_ms"]
    assert {row["name"] for row in result["top_ops"]} <= set(done.stdout.split())
    assert all(row["count"] >= 3 for row in result["top_ops"])


# Provenance --------------------------------------------------------------------------------
def test_provenance_has_no_absolute_path(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/opt/me/train.py", "--out-dir=/tmp/out/run", "/data", "out/b", "--lr=1/3"])
    result = json.loads(json.dumps(provenance()))
    assert result["command"] == "train.py --out-dir=run data out/b --lr=1/3"
    assert result["jax"] == jax.__version__ and result["device_count"] == jax.device_count() and result["cores"] >= 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", result["date"])
    assert not any(re.search(r"(^|[\s=])/", str(value)) for value in result.values())


def test_import_starts_no_device():
    code = "import sys, common.profiling; assert not {'torch', 'matplotlib', 'flax'} & set(sys.modules)"
    environment = {**os.environ, "JAX_PLATFORMS": "none_such"}  # starting a backend would raise
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
