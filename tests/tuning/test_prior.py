"""Times that ship with the package: for whom they count, what replaces them, and what a table has to be."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.core.device import Device
from layerzero.core.evidence import Measurement, Provenance
from layerzero.core.ledger import Ledger, Verdict
from layerzero.engine import probe
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.order import NEARLY, costs
from layerzero.engine.registry import REGISTRY
from layerzero.testing.generate import random_call
from layerzero.tuning.measurement.tune import asked_jobs
from layerzero.tuning.storage import archive, environment, prior
from layerzero.tuning.storage.prior import FOLDER, Priors
from layerzero.tuning.storage.rows import work_of
from layerzero.tuning.storage.store import StoreLedger, TimeStore
from layerzero.tuning.storage.tables import read_table, slug, table_of, told_apart

TIME = Measurement(10.0, 12.0, 0.01, 20, noise=0.02)
H200 = Device.named("H200")
SOME = replace(H200, name="Some Device")
TABLES = sorted(FOLDER.glob("*.json"))


@pytest.fixture
def installed(monkeypatch):
    """Libraries of the versions that were measured."""
    versions = {"vllm": "0.20.2", "flash_attn": "4.1.0", "torch": ""}

    def state(self, backend, device):
        return probe.LibraryState(versions.get(backend.name, "1.0"))

    monkeypatch.setattr(probe.Machine, "state", state)
    return versions


@pytest.fixture
def first_table(tmp_path, monkeypatch):
    """Only a table of round times, so that these can be named here."""
    (tmp_path / "nvidia-h200.json").write_bytes(Path(__file__).with_name("round_times.json").read_bytes())
    monkeypatch.setattr(prior, "FOLDER", tmp_path)
    monkeypatch.setattr(prior, "_LOADED", {})


def attention(batch, seq, heads=(32, 8), head_dim=128, *, layout="BSHD", **more):
    decode = more.pop("decode", False)
    dtype = more.pop("dtype", torch.bfloat16)
    shapes = [(batch, 1 if decode else seq, heads[0], head_dim), *2 * [(batch, seq, heads[1], head_dim)]]
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    if layout == "BHSD":
        tensors = [each.transpose(1, 2) for each in tensors]
    return lz.facts("attention", *tensors, layout=layout, device=more.pop("device", H200), **more)


def asked(facts):
    kernels = REGISTRY.candidates(facts["operation"])
    return costs(TimeStore().evidence(kernels, facts), kernels)


@at_once("file", TABLES)
def test_every_table_can_be_read_and_speaks_of_what_there_is(file):
    table = read_table(file)
    assert file.name.startswith(slug(table.device))
    for family in table.families:
        known = {kernel.id for kernel in REGISTRY.candidates(family.facts["operation"])}
        for case in family.cases:
            assert set(case.times_us) <= known
    assert set(table.versions) == {name for each in table.families for case in each.cases for name in case.times_us}


def test_a_device_of_the_name_chooses_by_the_table(installed, first_table):
    found = asked(attention(1, 2048))
    assert {each.provenance for each in found.values()} == {Provenance.PRIOR}
    assert found["torch.sdpa.cudnn"].time_us == 86.0
    assert found["vllm.flash_attn.v3"].time_us == 72.0
    assert "flashinfer.fa2.prefill" not in found, "which of its two backends ran is not known"
    assert all(each.confidence == prior.CONFIDENCE for each in found.values())
    assert asked(attention(1, 128))["torch.sdpa.cudnn"].noise == pytest.approx(0.05), "10 us, rounded to 1"
    decoding = asked(attention(1, 512, decode=True))["torch.sdpa.cudnn"]
    assert decoding.time_us == 12.0
    assert decoding.cost_us == pytest.approx(12.0 * NEARLY), "it plans for a length that nobody measured here"
    assert asked(attention(2, 4096, (24, 24), causal=False))["flash_attn.v4.sm90"].time_us == 579.0


def test_layout_does_not_count_and_graphs_count_alike(first_table):
    facts = attention(1, 2048, layout="BHSD")
    assert asked(facts)["torch.sdpa.cudnn"].time_us == 86.0
    assert asked(facts.on(H200, capturing=True))["torch.sdpa.cudnn"].time_us == 86.0


def test_sizes_between_those_of_the_table_are_predicted_with_less_confidence(first_table):
    found = asked(attention(1, 4096))
    assert 200 < found["torch.sdpa.cudnn"].time_us < 400
    assert all(each.confidence < prior.CONFIDENCE for each in found.values())
    assert all("us predicted from shipped times" in each.told for each in found.values())


@pytest.mark.parametrize(
    "facts",
    [
        lambda: attention(1, 2048, dtype=torch.float32),
        lambda: attention(1, 2048, head_dim=16),
        lambda: attention(1, 2, causal=False),
        lambda: attention(1, 2048, device=Device.named("A100")),
        lambda: attention(1, 2048, window=(100, 0)),
        lambda: attention(8192, 128),
    ],
    ids=["dtype", "head dim", "causal", "device", "window", "far away"],
)
def test_other_calls_get_nothing(facts, first_table):
    assert asked(facts()) == {}


def test_what_is_lacking_has_no_neighbour():
    """A miss asks that first, by bounds that are kept by kind; what is not lacking may still have no time."""
    found = Counter()
    for number in range(400):
        call, device = random_call(11, number), (Device.named("H100"), Device.detect("cpu"))[number % 2]
        facts = lz.explain(call.function, device=device, **call.arguments).facts
        near = prior.priors_of(device)._neighbours(told_apart(dict(work_of(facts).facts)), graph=False)
        found[prior.priors_of(device).lack(facts), bool(near)] += 1
    assert found[True, True] == 0 < found[True, False]
    assert found[False, True] > found[False, False]


@pytest.mark.parametrize(("facts", "worth"), [
    (lambda: attention(1, 2048, dtype=torch.float16), prior.NEIGHBOUR),
    (lambda: attention(1, 2048, head_dim=96), prior.NEIGHBOUR),
    (lambda: attention(1, 2048, device=Device.named("H100")), prior.ELSEWHERE),
], ids=["dtype", "head dim", "device"])  # fmt: skip
def test_times_travel_and_count_less(facts, worth, first_table):
    found, own = asked(facts()), asked(attention(1, 2048))
    assert {name: each.time_us for name, each in found.items()} == {name: each.time_us for name, each in own.items()}
    assert all(each.confidence == pytest.approx(worth * own[name].confidence) for name, each in found.items())


def cpu(name, *sets):
    return replace(Device.named("CPU"), name=name, instruction_sets=frozenset({"avx2", *sets}))


@pytest.fixture
def cpu_table(tmp_path):
    """A table of round times that a CPU with bfloat16 instructions took with two threads."""
    table = json.loads(Path(__file__).with_name("round_times.json").read_bytes())
    sets = ["avx2", "avx512", "avx512_bf16", "avx512_vnni"]
    about = {
        "device": "Some CPU",
        "driver": "",
        "threads": 2,
        "capability": "0123456789abcdef",
        "instruction_sets": sets,
    }
    (tmp_path / "some-cpu_01234567_dense.json").write_text(json.dumps(table | about))
    return tmp_path


@pytest.mark.parametrize(("sets", "threads", "worth"), [
    (("avx512", "avx512_vnni", "avx512_bf16"), 2, prior.CONFIDENCE * prior.ELSEWHERE),
    (("avx512", "avx512_vnni", "avx512_bf16", "avx_vnni"), 2, prior.CONFIDENCE * prior.ELSEWHERE),
    (("avx512", "avx512_vnni", "avx512_bf16"), 8, prior.CONFIDENCE * prior.ELSEWHERE * prior.OTHER_THREADS),
    (("avx512", "avx512_vnni"), 2, None),
    ((), 2, None),
    (("avx512", "avx512_vnni", "avx512_bf16", "amx_bf16"), 2, None),
])  # fmt: skip
def test_a_cpu_without_a_table_has_that_of_one_with_its_unit_for_products(sets, threads, worth, cpu_table, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    priors = Priors(cpu("Another CPU", *sets), cpu_table)
    assert bool(priors) is (worth is not None)
    assert not priors.problems
    if worth is not None:
        assert all(priors._worth(table) == pytest.approx(worth) for table, _ in priors._families.values())


def test_of_two_cpus_the_one_with_more_alike_counts(cpu_table, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    nearer = json.loads((cpu_table / "some-cpu_01234567_dense.json").read_text())
    nearer |= {"device": "Nearer", "capability": "f" * 16, "instruction_sets": ["avx2", "avx512", "avx512_bf16"]}
    (cpu_table / "nearer_ffffffff_dense.json").write_text(json.dumps(nearer))
    priors = Priors(cpu("Another CPU", "avx512", "avx512_bf16"), cpu_table)
    assert {table.device for table, _ in priors._families.values()} == {"Nearer"}


def test_a_cpus_table_that_is_none_is_a_problem_for_every_cpu(cpu_table):
    (cpu_table / "broken_eeeeeeee_dense.json").write_text("{")
    assert "broken_eeeeeeee_dense.json" in "".join(Priors(cpu("Another CPU"), cpu_table).problems)


def test_another_major_version_does_not_count(installed, first_table, monkeypatch):
    installed["vllm"] = "0.21.1"
    found = asked(attention(1, 2048))
    assert "vllm.flash_attn.v3" not in found
    assert found["flash_attn.v4.sm90"].time_us == 68.0
    assert "torch.sdpa.cudnn" in found
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    assert "torch.sdpa.cudnn" not in asked(attention(1, 2048))


def test_one_time_of_the_users_own_replaces_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    facts = attention(1, 2048)
    TimeStore().record(REGISTRY.kernel("torch.sdpa.flash"), facts, TIME)
    assert {name: each.provenance for name, each in asked(facts).items()} == {"torch.sdpa.flash": Provenance.MEASURED}


def test_explain_says_prior():
    tensors = [torch.empty(1, 2048, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8, 8)]
    assert "as shipped" not in str(lz.explain("attention", *tensors, layout="BSHD", device="H200"))
    ENGINE.ledger = StoreLedger(Ledger())
    assert "as shipped" in str(lz.explain("attention", *tensors, layout="BSHD", device="H200"))


GOOD = {
    "format": 1,
    "kind": "layerzero priors",
    "device": "Some Device",
    "driver": "1",
    "torch": "2.13.0",
    "versions": {"torch.rms_norm": ""},
    "date": "2026-11-21",
    "script": "a test",
    "families": [
        {
            "facts": {"operation": "norm.rms", "dtype": "float32"},
            "cases": [{"sizes": {"rows": 4, "hidden": 64}, "times_us": {"torch.rms_norm": 3.0}}],
        }
    ],
}


def family(**changes):
    return {"families": [GOOD["families"][0] | changes]}


BAD = {
    "another kind": ({"kind": "x"}, "wanted format 1 of 'layerzero priors'"),
    "a field too many": ({"extra": 1}, "unknown field `extra`"),
    "no date": ({"date": "yesterday"}, "yesterday"),
    "no version": ({"versions": {}}, "wanted the version of its library"),
    "no dtype": (family(facts={"operation": "norm.rms", "dtype": "x"}), "wanted an operation and a dtype"),
    "a loose fact": (
        family(facts=GOOD["families"][0]["facts"] | {"layout": "BSHD"}),
        "wanted none that a table does not tell apart or that is a size, got layout",
    ),
    "no time": (
        family(cases=[{"sizes": {"rows": 4}, "times_us": {"torch.rms_norm": 0.0}}]),
        "wanted a time above 0, got 0.0",
    ),
    "no size": (
        family(cases=[{"sizes": {"head_dim": 4}, "times_us": {"torch.rms_norm": 1.0}}]),
        "wanted the same scaling sizes in each",
    ),
    "size 0": (family(cases=[{"sizes": {"rows": 0}, "times_us": {"torch.rms_norm": 1.0}}]), "wanted numbers above 0"),
}


@pytest.mark.parametrize("spoilt", BAD)
def test_a_table_that_is_none_is_told_and_does_not_count(tmp_path, spoilt):
    change, message = BAD[spoilt]
    file = tmp_path / "some-device.json"
    file.write_text(json.dumps(GOOD))
    assert Priors(SOME, tmp_path)
    file.write_text(json.dumps(GOOD | change))
    found = Priors(SOME, tmp_path)
    assert not found
    assert len(found.problems) == 1
    assert message in found.problems[0]


def test_processors_of_one_name_have_tables_of_their_own(monkeypatch):
    monkeypatch.setattr(prior, "_LOADED", {})
    sets = next(each for each in map(read_table, TABLES) if each.instruction_sets).instruction_sets
    wide, bare = (replace(Device.detect("cpu"), instruction_sets=frozenset(each)) for each in (sets, ()))
    found = prior.priors_of(wide).tables
    assert found
    assert prior.priors_of(bare).tables == ()
    assert prior.priors_of(wide).tables is found


def test_a_broken_table_is_named_by_doctor(tmp_path, monkeypatch):
    (tmp_path / f"{slug(H200.name)}.json").write_text("{")
    monkeypatch.setattr(prior, "FOLDER", tmp_path)
    monkeypatch.setattr(prior, "_LOADED", {})
    store = TimeStore()
    assert store.evidence(REGISTRY.candidates("attention.gqa.prefill"), attention(1, 2048)) == {}
    (note,) = store.notes()
    assert "nvidia-h200.json: no priors: " in note


def test_measured_times_become_a_table(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    monkeypatch.setattr(environment, "driver_version", lambda device: "7.0")
    environment._surroundings.cache_clear()
    store, kernel = TimeStore(), REGISTRY.kernel("torch.rms_norm")
    for rows in (4, 8, 16):
        facts = lz.facts("rms_norm", torch.empty(rows, 64), torch.empty(64))
        store.record(kernel, facts, replace(TIME, median_us=float(rows)))
    table = table_of(archive.rows(store.database), "a test")
    environment._surroundings.cache_clear()
    assert (table.driver, table.torch, table.script) == ("7.0", torch.__version__, "a test")
    assert [case.times_us for case in table.families[0].cases] == [
        {"torch.rms_norm": float(rows)} for rows in (4, 8, 16)
    ]
    file = tmp_path / f"{slug(table.device)}.json"
    archive.export_prior(table, file)
    assert read_table(file) == table
    found = Priors(Device.detect("cpu"), tmp_path).evidence(
        [kernel], lz.facts("rms_norm", torch.empty(8, 64), torch.empty(64))
    )
    assert found["torch.rms_norm"].time_us == 8.0
    for change in ({"threads": table.threads + 1}, {"capability": "another"}):  # the same name, another processor
        archive.export_prior(msgspec.structs.replace(table, **change), file)
        assert not Priors(Device.detect("cpu"), tmp_path)
    rows = [*archive.rows(store.database)]
    other = msgspec.structs.replace(rows[0], environment=msgspec.structs.replace(rows[0].environment, torch="1.0"))
    with pytest.raises(ValueError, match="wanted times of one device, driver and torch"):
        table_of([*rows, other], "a test")
    with pytest.raises(ValueError, match="got nothing"):
        table_of([], "a test")


@pytest.mark.parametrize(
    "operation", ["attention.gqa.decode.paged", "embedding.lookup", "norm.layer", "kv.append.paged"]
)
def test_calls_with_tables_and_optional_tensors_are_in_a_table(operation, tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    kernel = next(each for each in REGISTRY.candidates(operation) if each.source == "torch")
    facts = next(
        each
        for each in (job.facts("cpu") for job in asked_jobs(operation, "cases", ["float32"], "cpu"))
        if dict(work_of(each).facts)["row_alignment"] == "16"
    )
    store = TimeStore()
    store.record(kernel, facts, replace(TIME, median_us=7.0))
    file = tmp_path / f"{slug(facts.device.name)}.json"
    archive.export_prior(table_of(archive.rows(store.database), "a test"), file)
    assert Priors(facts.device, tmp_path).evidence([kernel], facts)[kernel.id].time_us == 7.0


@pytest.mark.parametrize("here", ["0.19.0", "0.20.1", None])
def test_a_question_about_other_libraries_has_the_times_of_their_versions(here, first_table, monkeypatch):
    """What is installed here says nothing about them, nor do they about what is installed here."""
    found_here = probe.installed_version
    monkeypatch.setattr(probe, "installed_version", lambda name: here if name == "vllm" else found_here(name))
    monkeypatch.setattr(ENGINE, "_ledger", StoreLedger(Ledger()))
    probe.forget()
    call, kernel = attention(1, 2048), REGISTRY.kernel("vllm.flash_attn.v3")
    report = lz.explain(call, libraries={"vllm": "0.20.0", "torch": "2.11.0"})
    assert next(each for each in report.candidates if each.kernel is kernel).time_us is not None
    for libraries in ({"vllm": "0.19.0"}, {"vllm": "0.20.0", "torch": "3.0.0"}):
        others = TimeStore().evidence(REGISTRY.candidates(call["operation"]), call, probe.Machine(None, libraries))
        assert (kernel.id in others) is (libraries["vllm"] == "0.20.0")
        assert ("torch.sdpa.cudnn" in others) is ("torch" not in libraries)


def test_what_was_found_here_says_nothing_about_another_version(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    lz.configure()
    store, kernel, libraries = TimeStore(), REGISTRY.kernel("torch.rms_norm"), {"torch": "3.0.0"}
    call = lz.facts("rms_norm", torch.empty(8, 64), torch.empty(64))
    store.record(kernel, call, TIME)
    assert kernel.id in store.evidence([kernel], call)
    assert kernel.id in store.evidence([kernel], call, probe.Machine(None, {"torch": torch.__version__}))
    assert store.evidence([kernel], call, probe.Machine(None, libraries)) == {}
    monkeypatch.setattr(ENGINE, "_ledger", Ledger())
    ENGINE.ledger.record_verdict(kernel, call, Verdict.WRONG)
    assert lz.explain(call).reasons(kernel.id)
    assert lz.explain(call, libraries={"torch": torch.__version__}).reasons(kernel.id)
    assert not lz.explain(call, libraries=libraries).reasons(kernel.id)


def test_a_table_tells_optional_tensors_and_other_dtypes_apart_but_no_dtypes_of_tables():
    def of(memory):
        return told_apart(dict(work_of(attention(1, 2048)).facts) | {"memory": memory})

    assert of("tables:int32 lengths:int64") == of("key:rows") == of("")
    assert len({of(""), of("bias:n"), of("bias:nx1"), of("key:float8_e4m3 tables:int32")}) == 4


def test_the_table_knows_every_fact_of_a_call():
    """A new fact of attention makes the table say nothing: it has to be written into the table then."""
    work = dict(work_of(attention(1, 2048)).facts)
    facts = {name for name, _ in told_apart(work)}
    table = read_table(FOLDER / "nvidia-h200_dense.json")
    assert facts == set(table.families[0].facts)
