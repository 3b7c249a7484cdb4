"""Tests of what bench.py compares and counts, and that README.md says what results/ hold. No test measures time."""
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bench
import bench_report
import model
import train

HERE = Path(__file__).resolve().parent


needs_bench = pytest.mark.skipif(not (HERE / "results" / "bench.json").exists(),
                                 reason="not verified: the ratios to PyTorch, which results/bench.json doesn't hold yet")


def results(name):
    return json.loads((HERE / "results" / f"{name}.json").read_text(encoding="utf-8"))


# What is compared ------------------------------------------------------------------------

@pytest.mark.parametrize("conv", [model.plain_conv, bench.conv_of_patches])
@pytest.mark.parametrize("I", [3, 6])
def test_variants_of_the_convolution_are_the_convolution(conv, I):
    x, w, g = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(
        ((2, 16, 6, I), (3, 3, I, 5), (2, 16, 6, 5))))
    want, pull = jax.vjp(model.conv, x, w)
    got, pull_got = jax.vjp(conv, x, w)
    for a, b in zip((want, *pull(g)), (got, *pull_got(g))):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=5e-5)


def test_the_variant_of_the_gradient_of_weights_is_that_gradient():
    x, g = (jax.random.normal(jax.random.key(i), (2, 16, 16, C)) for i, C in enumerate((3, 5)))
    want = model.weight_gradient_by_taps(x, g)
    np.testing.assert_allclose(bench.weight_gradient_by_xla(x, g), want, rtol=2e-5, atol=1e-4)  # sums of 512 values


def test_variants_of_pooling_and_variance_are_the_same_function():
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    g = jax.random.normal(jax.random.key(1), (2, 4, 4, 3))
    (want, pull), (got, pull_got) = jax.vjp(model.max_pool, x), jax.vjp(bench.pool_by_window, x)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(pull_got(g)[0], pull(g)[0])
    for a, b in zip(model.moments(x), bench.moments_in_one_pass(x)):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


def test_a_variant_stands_in_model_only_while_it_is_traced():
    before = dict(vars(model))

    def refuse(x, w):
        raise RuntimeError("the variant was called")
    with pytest.raises(RuntimeError, match="the variant was called"):
        bench.make_step(train.CPU, patches={"conv": refuse})
    assert vars(model) == before
    for options in bench.VARIANTS.values():
        assert set(options.get("patches", {})) <= set(before)


# What is counted -------------------------------------------------------------------------

def test_flops_of_a_convolution_are_those_of_its_product():
    for layer in bench.LAYERS:
        x, w, _ = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in bench.layer_arrays(layer))
        count = jax.jit(bench.conv_of_patches).lower(x, w).cost_analysis()["flops"]
        assert count == bench.conv_flops(layer)  # a pad and a concatenation add none


def test_layers_are_convolved_at_the_sizes_that_the_network_has(monkeypatch):
    seen = {}

    def note(x, w):
        seen[len(seen)] = (*x.shape[1:], w.shape[3])
        return model.plain_conv(x, w)
    monkeypatch.setattr(model, "conv", note)
    shapes = jax.eval_shape(lambda: (model.init_params(jax.random.key(0)), model.init_stats()))
    jax.eval_shape(lambda params, stats: model.forward(params, stats, jnp.zeros((2, 32, 32, 3)), True), *shapes)
    want = [(bench.SIDES[name], bench.SIDES[name], I, O) for name, (I, O) in model.layers_of().items()]
    assert list(seen.values()) == want


def test_operations_are_told_apart_by_where_they_come_from():
    def loss(params, x):
        return jax.nn.relu(model.plain_conv(model.plain_conv(x, params[0]), params[1])).sum()
    params = [jax.random.normal(jax.random.key(i), (3, 3, 4, 4)) for i in range(2)]
    compiled = jax.jit(jax.value_and_grad(loss)).lower(params, jnp.ones((2, 8, 8, 4))).compile()
    kinds = [op["kind"] for op in bench.op_table(compiled)]
    assert kinds.count("convolution, forward") == kinds.count("convolution, dw") == 2
    assert kinds.count("convolution, dx") == 1  # none for x, whose gradient nobody asks for


def test_the_distance_of_statistics_by_hand():
    true = {"a": {"mean": jnp.array([1.0, 2.0]), "var": jnp.array([4.0, 1.0])}}
    assert bench.distance(true, true) == {"mean": 0, "var": 0}
    moved = {"a": {"mean": jnp.array([3.0, 2.0]), "var": jnp.array([2.0, 1.0])}}  # by one s.d.; half of it
    np.testing.assert_allclose([*bench.distance(moved, true).values()], [1 / 2**0.5, 0.5 / 2**0.5], rtol=1e-6)


def test_finished_runs_are_not_repeated_and_cut_ones_start_anew(tmp_path, monkeypatch):
    started = []

    def fake(name, *arguments):
        folder = Path(arguments[-1])
        assert not (folder / "config.json").exists() and (name, arguments[0]) == ("train.py", "--dataset=shapes")
        started.append(folder.name)
        result = {key: 0 for key in bench.KEPT} | {"dataset": "shapes", "test_accuracy": 0.5}
        (folder / "result.json").write_text(json.dumps(result))
        lines = [{"step": 60 * i, "losses": 60 * [1.0], **({"test_accuracy": 0.5} if i == 2 else {})} for i in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(bench, "script", fake)
    bench.run_folder("shapes-s1").mkdir(parents=True)  # cut: no result
    (bench.run_folder("shapes-s1") / "config.json").touch()
    bench.accuracy("shapes-s1")
    bench.accuracy("shapes")
    bench.accuracy("shapes")
    assert started == ["accuracy-shapes-s1", "accuracy-shapes-s0", "accuracy-shapes-s2"]
    rows = json.loads((tmp_path / "results" / "accuracy.json").read_text())["rows"]
    assert [row["run"] for row in rows] == ["shapes-s0", "shapes-s1", "shapes-s2"]
    assert rows[0]["accuracy_curve"] == [[120, 0.5]] and len(rows[0]["loss_curve"]) == 90


def test_an_unknown_part_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--accuracy", "shots"])
    with pytest.raises(SystemExit) as stopped:
        bench.main()
    assert stopped.value.code == 2 and "shots" in (said := capsys.readouterr().err) and "short" in said


def test_a_script_that_fails_ends_this_one_with_its_status():
    with pytest.raises(SystemExit) as stopped:
        bench.script("train.py", "--preset=none")
    assert stopped.value.code == 2


# What the README says ---------------------------------------------------------------------

def test_the_tables_of_the_readme_are_those_of_results():
    text = (HERE / "README.md").read_text(encoding="utf-8")
    tables = bench_report.readme_tables()
    for name, table in tables.items():
        assert f"<!-- table:{name} -->\n{table.rstrip()}\n<!-- /table -->" in text, name
    assert sorted(re.findall(r"<!-- table:(\w+) -->", text)) == sorted(tables)


@needs_bench
def test_results_hold_every_ratio():
    rows = results("bench")["rows"]
    assert all(set(row) >= {"name", "metric", "value", "unit", "baseline", "ratio", "predicted"} for row in rows)
    ratios = {(row["name"], row["baseline"]) for row in rows if row["metric"] == "ratio"}
    assert {(f"{setting}: JAX", f"{setting}: {side}") for setting in bench.SETTINGS for side in bench.EAGER} <= ratios
    assert {f"variant: {name}" for name in bench.VARIANTS} <= {row["name"] for row in rows}


def test_results_hold_what_the_readme_claims():
    runs = {row["run"]: row for row in results("accuracy")["rows"]}
    assert {bench.SHOWN, "short-s0"} <= set(runs) <= set(bench.RUNS)
    assert all(row["test_accuracy"] >= 0.75 for name, row in runs.items() if name.startswith("short"))
    assert runs[bench.SHOWN]["wall_s"] <= 1500 and runs[bench.SHOWN]["test_accuracy"] > runs["short-s0"]["test_accuracy"]
    predicted = results("kernels")["rows"]
    assert any(row["predicted"] for row in predicted)


def test_running_statistics_and_their_neglect_are_as_the_readme_says():
    kept = results("statistics")
    first, later = kept["held"][0], kept["held"][10]
    for what in ("mean", "var"):
        assert later[what] == pytest.approx(first[what] * kept["momentum"] ** 10, rel=0.25)
    end = kept["training"][-1]
    assert end["accuracy_running"] > end["accuracy_never_updated"] + 0.2
    with np.load(HERE / "results" / "predictions.npz") as stored:
        assert stored["confusion"].sum() == 10_000 and stored["images"].shape == (24, 32, 32, 3)
        assert np.trace(stored["confusion"]) / 10_000 == pytest.approx(float(stored["running"]))
        long_run = {row["run"]: row for row in results("accuracy")["rows"]}[bench.SHOWN]
        assert float(stored["running"]) == pytest.approx(long_run["test_accuracy"], abs=1e-3)
        assert stored["running"] > stored["never_updated"] + 0.2


def test_every_figure_stands_beside_its_data_and_has_a_caption():
    for file in (HERE / "results").iterdir():
        assert file.stat().st_size < 300_000, file.name
    text = (HERE / "README.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"\]\(figures/(\w+)\.svg\)\n\n(.)", text))
    assert set(shown) == {path.stem for path in (HERE / "figures").glob("*.svg")}
    assert all(letter.isalpha() for letter in shown.values())  # text, not the next picture or table


@needs_bench
@pytest.mark.slow
def test_bench_quick_repeats_the_rows(tmp_path):
    done = subprocess.run([sys.executable, str(HERE / "bench.py"), "--quick"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    quick = json.loads((tmp_path / "out" / "bench-quick.json").read_text())["rows"]
    assert [row["name"] for row in quick] == [row["name"] for row in results("bench")["rows"]]
