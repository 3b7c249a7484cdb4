"""Tests of what bench.py compares and counts, and that README.md says what results/ hold. No test measures time."""
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import bench
import bench_report
import data
import model
import run
import train

HERE = Path(__file__).resolve().parent


def needs(*names):
    missing = [name for name in names if bench_report.read(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not verified: results/ lacks {', '.join(missing)}")


# What is compared ------------------------------------------------------------------------

@pytest.mark.parametrize("form", bench.FORMS)
def test_the_forms_and_the_loop_beside_them_are_the_same_function(form):
    pytest.importorskip("torch", reason="not verified: the loop over experts in PyTorch")
    n_experts, tokens = 4, 24
    want_y, want_dx = (np.asarray(a.detach()) for a in bench.torch_layer(n_experts, tokens)())
    y, (dx, _) = bench.jax_layer(form, n_experts, tokens, capacity_factor=n_experts / bench.K)[0]()  # nothing dropped
    np.testing.assert_allclose(y[0], want_y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dx[0], want_dx, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("patches", [options["patches"] for options in bench.VARIANTS.values() if "patches" in options])
def test_variants_leave_outputs_and_gradients_as_they_are(patches):
    cfg, arrays = bench.layer_config("gather", 4, 16), jax.device_put(bench.layer_arrays(4, 16))

    def of_layer():
        return jax.jit(lambda *arrays: bench.outputs_and_gradients(*arrays, cfg))(*arrays)
    want = of_layer()
    with bench.patched(patches):
        got = of_layer()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_a_variant_stands_in_model_only_while_it_is_traced():
    before = dict(vars(model))

    def refuse(x, w):
        raise RuntimeError("the variant was called")
    with pytest.raises(RuntimeError, match="the variant was called"):
        bench.variant(patches={"matmul": refuse})
    assert vars(model) == before
    for options in bench.VARIANTS.values():
        assert set(options.get("patches", {})) <= set(before)


def test_one_group_is_measured_at_the_size_of_the_issue():
    x, p, g = bench.layer_arrays()
    assert x.shape == g.shape == (1, 1024, 128) and p["w_in"].shape == (8, 128, 512)
    assert all(a.dtype == np.float32 for a in (x, g, *p.values()))
    assert bench.layer_config("gather").top_k == 2 and (8, 1024) in bench.POINTS


# What is counted -------------------------------------------------------------------------

TINY = train.Config(n_layer=2, n_head=2, n_embd=16, context=8, n_hidden=24, n_experts=4, batch_size=2, max_iters=4)


def test_operations_are_told_apart_by_the_function_they_come_from():
    before = dict(vars(model))
    ops = bench.profiling.op_table(bench.scoped_step(dataclasses.replace(TINY, n_layer=1)), top=100_000)
    assert vars(model) == before
    kinds = {bench.kind_of(op) for op in ops}
    assert {*bench.SCOPES.values(), "experts, products", bench.OUTSIDE, bench.OTHER} == kinds
    backward = {bench.kind_of(op) for op in ops if "transpose(jvp" in (op["op_name"] or "")}
    assert {"moving rows", "experts, products", "attention and norms", "router"} <= backward


def test_shares_of_characters_are_those_of_the_choices_that_the_model_makes():
    model_cfg, route = TINY.model(11), model.route
    params = train.init_state(TINY, model_cfg)["params"]
    tokens = np.asarray(jax.random.randint(jax.random.key(0), (5, 8), 0, 11))
    shares = bench.shares_of(params, tokens, model_cfg)  # (L, V, E)
    assert model.route is route and shares.shape == (2, 11, 4)
    count = np.bincount(tokens.reshape(-1), minlength=11)
    np.testing.assert_allclose(shares.sum(-1), np.broadcast_to(count > 0, (2, 11)))
    load = jax.jit(lambda: model.forward(params, tokens, model_cfg)[1]["load"])()
    np.testing.assert_allclose(np.einsum("lve,v->le", shares, count) / count.sum(), load, rtol=1e-5)


def test_flops_of_a_step_do_not_depend_on_how_many_experts_there_are_but_for_the_router():
    moe, dense = train.PRESETS["moe"], train.PRESETS["dense"]
    routers = 2 * moe.n_layer * moe.n_embd * moe.n_experts
    extra = bench.step_flops(moe) - bench.step_flops(dense)
    assert extra == 3 * moe.batch_size * moe.context * routers


def test_each_pass_sends_slots_to_the_experts_and_back():
    got = bench.parallel_rows(devices=2, batch=2, tokens=8, embd=16, hidden=8)
    exchanged = {r["program"]: r for r in got["table"] if r["collective"] == "all-to-all"}
    places = model.capacity(8, 2, 2, 1.25)  # a device has one sequence: E x C slots of D float32 numbers
    assert exchanged["forward"]["bytes"] == exchanged["forward"]["number"] * 2 * places * 16 * 4
    assert exchanged["gradient"]["bytes"] == 2 * exchanged["forward"]["bytes"]
    assert max(got["errors"].values()) <= 1e-6 and all(row["predicted"] == (row["unit"] == "us") for row in got["rows"])
    assert len(bench_report.parallel_table(got)) == len(got["table"])


# Full runs -------------------------------------------------------------------------------

@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Results, figures and README go to a temporary folder, which is the working directory too."""
    shutil.copy(HERE / "README.md", tmp_path)
    for module in (bench, bench_report):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(bench_report, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(bench_report, "HERE", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    return tmp_path


def finish(folder, flags, tokens_per_s=100.0, val_loss=1.5):
    """The files of a finished run, as train.py leaves them."""
    cfg = train.parse(list(flags))
    L, E = cfg.n_layer, cfg.n_experts
    result = dict.fromkeys(bench.KEPT, 0.0) | {
        "dataset": "tiny_shakespeare", "steps": cfg.max_iters, "seed": cfg.seed, "val_loss": val_loss,
        "tokens_per_s": tokens_per_s, "params": 10 ** 6 * (E + 1) + cfg.n_hidden,
        "active_params": 10 ** 6 * (cfg.top_k + 1 if E else 1) + cfg.n_hidden}
    routing = {"dropped": 0.1, "load": np.full((L, E), 1 / E).tolist()} if E else {}
    lines = [{"step": 50 * i, "loss": 2.0, **routing} for i in range(1, 5)] + [{"step": 200, "eval_val_loss": 1.9}]
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def fake_runs(elsewhere, monkeypatch):
    """bench.script that finishes a run at once; returns the list of (name, flags) that were started."""
    started = []

    def fake(name, *arguments):
        assert name == "train.py" and arguments[-2] == "--out-dir"
        folder = Path(arguments[-1])
        assert [path.name for path in folder.iterdir()] == ["machine.json"]
        flags = [a for a in arguments[:-2] if not a.startswith("--dataset")]
        started.append((folder.name.removeprefix("losses-"), flags))
        dense = "--preset=dense" in flags
        finish(folder, flags, tokens_per_s=150.0 if dense else 100.0, val_loss=1.4 + 0.1 * dense + 0.001 * len(started))
    monkeypatch.setattr(bench, "script", fake)
    monkeypatch.setattr(bench, "routing_of", lambda folder: {
        "sample": "ROMEO:\nAy. ", "k": 2, "characters": ["\n", "a"], "before": np.full((4, 2, 8), 0.125).tolist(),
        "after": np.full((4, 2, 8), 0.125).tolist()})
    return started


def test_finished_runs_are_not_repeated_and_cut_ones_start_anew(fake_runs):
    bench.run_folder("moe-s1").mkdir(parents=True)  # cut: no result
    (bench.run_folder("moe-s1") / "config.json").touch()
    bench.losses("moe-s1")
    bench.losses("main")
    bench.losses("main")
    assert [name for name, _ in fake_runs] == ["moe-s1", "moe-s0", "moe-s2", "dense-s0", "dense-s1", "dense-s2"]
    rows = bench_report.read("losses")["rows"]
    assert [row["run"] for row in rows] == list(bench.PARTS["main"])
    assert [("load_curve" in row) for row in rows] == [True] + 5 * [False]
    assert np.shape(rows[0]["load_curve"][0][1]) == (4, 8) and rows[0]["curve"] == [[200, 1.9]]


def test_the_dense_model_is_given_the_time_that_the_experts_take(fake_runs):
    with pytest.raises(SystemExit) as stopped:
        bench.losses("time")
    assert stopped.value.code == 2 and not fake_runs
    bench.losses("main")
    bench.losses("time")
    assert fake_runs[-1] == ("dense-time", ["--preset=dense", "--max-iters=3000"])  # 1.5 times as fast


def test_the_flags_of_every_run_are_train_pys():
    for name, flags in bench.RUNS.items():
        cfg = train.parse(list(flags))
        assert cfg.max_iters == 2000 and cfg.preset == ("dense" if "dense" in name else "switch" if name == "switch"
                                                        else "moe")


@pytest.mark.slow
def test_what_is_read_off_a_run_is_its_text_and_the_experts_of_its_characters(tmp_path):
    cfg = dataclasses.replace(TINY, dataset="python-docs")
    corpus = data.load(cfg.dataset)
    state = train.init_state(cfg, cfg.model(len(corpus.vocab)))
    run.save_config(tmp_path, cfg)
    checkpoints = run.Checkpoints(tmp_path)
    checkpoints.save("latest", 1, jax.tree.map(lambda a: 2 * a, state), {"vocab": corpus.vocab})
    checkpoints.close()
    got = bench.routing_of(tmp_path, most=5)
    before, after = np.array(got["before"]), np.array(got["after"])
    assert got["sample"].startswith("ROMEO:") and len(got["sample"]) == 306
    assert " " in got["characters"] and len(got["characters"]) == 5
    assert before.shape == after.shape == (2, 5, 4) and not np.array_equal(before, after)
    np.testing.assert_allclose(after.sum(-1), 1, atol=4e-4)  # four numbers of four digits


def test_an_unknown_part_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--losses", "mine"])
    with pytest.raises(SystemExit) as stopped:
        bench.main()
    assert stopped.value.code == 2 and "mine" in (said := capsys.readouterr().err) and "sizes" in said


def test_a_script_that_fails_ends_this_one_with_its_status():
    with pytest.raises(SystemExit) as stopped:
        bench.script("train.py", "--preset=none")
    assert stopped.value.code == 2


# The report ------------------------------------------------------------------------------

def fake_compare(specs, rounds, seconds):
    """Stands in for bench.compare: sides without processes, the first one twice as slow as the others."""
    def metrics(i, spec):
        if spec["side"] == "variants":
            return {name: 2.0 for name in bench.VARIANTS} | {f"ratio: {name}": 1.5 for name in bench.VARIANTS}
        if spec["side"] == "costs":
            points = [bench.point(*at) for at in bench.POINTS]
            memory = {f"{at}, MiB": 3.0 for at in points} if spec["form"] != bench.LOOP else {}
            return {at: 10.0 - i for at in points} | memory
        return {"ms": 1.0, "tokens_per_s": 1000.0 * (1 + bool(i))} | ({"dropped": 0.05} if "form" in spec else {})
    sides = {name: {metric: {"median": v, "min": v, "max": v, "values": [v]} for metric, v in metrics(i, spec).items()}
             for i, (name, spec) in enumerate(specs.items())}
    return {"sides": sides, "load_before": 0.5}


def fake_profile():
    metrics = ("compile", "first call", "median", "p90", "FLOPs", "reached", "share of peak", "intensity", "state",
               "temporaries")
    rows = [bench.row(f"step {preset}", metric, 7.0, "ms") for preset in ("moe", "dense") for metric in metrics]
    rows += [bench.row("machine", "peak float32", 100.0, "GFLOP/s"),
             bench.row("machine", "peak bandwidth", 10.0, "GB/s"), bench.row("trace moe", "gap", 1.0, "ms")]
    op = {"name": "dot", "kind": "experts", "shape": "f32[2]{0}", "bytes": 8, "op_name": "jit(f)/dot_general"}
    return rows, {"ops": [op], "largest": [op], "step_ms_by_kind": {"experts": 2.0, "router": 1.0}}


def test_everything_measured_reaches_the_figures_and_the_readme(elsewhere, fake_runs, monkeypatch):
    monkeypatch.setattr(bench, "compare", fake_compare)
    monkeypatch.setattr(bench, "profile_rows", fake_profile)
    bench.measure_all(quick=False)
    bench.losses("main")
    bench.losses("all")
    bench_report.draw_all()
    bench_report.write_readme()
    text = (elsewhere / "README.md").read_text(encoding="utf-8")
    left = {name for name, body in re.findall(r"<!-- table:([\w-]+) -->\n(.*?)<!-- /table -->", text, re.DOTALL)
            if "Not measured yet" in body}
    assert left == {"parallel", *bench_report.SOURCES["kernels"]}
    drawn = {path.stem for path in (elsewhere / "figures").glob("*.svg")}
    assert drawn == set(re.findall(r"\]\(figures/(\w+)\.svg\)", text))
    assert "| gather | 2,000 | 2,000 to 2,000 | **2.00×** | 5.0 % |" in text
    assert "| moe, JAX | 1,000 | 1,000 to 1,000 | dense, JAX | 2,000 | 2,000 to 2,000 | **0.50×** |" in text
    assert "```\nROMEO:\nAy.\n```" in text and "| 32 | 1,024 |" in text


def test_a_loss_is_better_only_beyond_the_noise_of_the_seeds():
    def table(moe, dense, time):
        rows = [{"run": f"{name}-s{i}", "val_loss": loss, "tokens_per_s": speed, "params": size}
                for name, losses, speed, size in (("moe", moe, 100.0, 300), ("dense", dense, 101.0, 100))
                for i, loss in enumerate(losses)]
        rows.append({"run": "dense-time", "val_loss": time, "steps": 3000, "tokens_per_s": 1.0, "params": 100})
        return [r["better"] for r in bench_report.wins(rows)]
    assert table([1.0, 1.1, 1.2], [1.29, 1.29, 1.29], 1.31) == ["neither", "MoE", "neither", "dense"]
    assert table([1.0, 1.1, 1.2], [1.31, 1.31, 1.31], 0.5) == ["MoE", "dense", "neither", "dense"]
    assert bench_report.wins([]) == []


def test_the_tables_of_the_readme_are_those_of_results():
    text = (HERE / "README.md").read_text(encoding="utf-8")
    tables = bench_report.readme_tables()
    for name, table in tables.items():
        assert f"<!-- table:{name} -->\n{table.rstrip()}\n<!-- /table -->" in text, name
    assert sorted(re.findall(r"<!-- table:([\w-]+) -->", text)) == sorted(tables)


@needs("bench", "losses", "routing")
def test_every_figure_stands_beside_its_data_and_has_a_caption():
    for file in (HERE / "results").iterdir():
        assert file.stat().st_size < 300_000, file.name
    text = (HERE / "README.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"\]\(figures/(\w+)\.svg\)\n\n(.)", text))
    assert set(shown) == {path.stem for path in (HERE / "figures").glob("*.svg")}
    assert all(letter.isalpha() for letter in shown.values())  # text, not the next picture or table


@needs("bench")
def test_results_hold_every_ratio_and_the_fast_form_is_fast():
    rows = bench_report.read("bench")["rows"]
    assert all(set(row) >= {"name", "metric", "value", "unit", "baseline", "ratio", "predicted"} for row in rows)
    ratios = {(row["name"], row["baseline"]): row["ratio"] for row in rows if row["metric"] == "ratio"}
    assert {(f"layer: {form}", f"layer: {bench.LOOP}") for form in bench.FORMS} <= set(ratios)
    assert ratios["layer: gather", f"layer: {bench.LOOP}"] >= 1.3
    assert {f"variant: {name}" for name in bench.VARIANTS} <= {row["name"] for row in rows}


@needs("losses")
def test_results_hold_three_seeds_of_both_models():
    rows = {row["run"]: row for row in bench_report.read("losses")["rows"]}
    assert set(bench.PARTS["main"]) <= set(rows) <= set(bench.RUNS)
    for name in bench.PARTS["main"]:
        row = rows[name]
        assert row["dataset"] == "tiny_shakespeare" and row["steps"] == 2000 and row["wall_s"] <= 300
        assert 1.5 < row["val_loss"] < 2.0 and 0 <= row["dropped"] < 0.5


@pytest.mark.slow
def test_bench_quick_measures_every_row(tmp_path):
    done = subprocess.run([sys.executable, str(HERE / "bench.py"), "--quick"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out" / "bench-quick.json").read_text())["rows"]
    names = {row["name"] for row in rows}
    assert {f"layer: {form}" for form in (bench.LOOP, *bench.FORMS)} <= names
    assert {f"variant: {name}" for name in bench.VARIANTS} <= names
    assert {f"cost, {bench.point(*at)}: {form}" for at in bench.POINTS for form in (bench.LOOP, *bench.FORMS)} <= names
    assert {"step moe", "step dense", "trace moe", "machine", "train: moe, JAX", "train: dense, PyTorch"} <= names
