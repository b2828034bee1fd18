"""spec.toml: what is read from a good one, and a clear refusal of every bad one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tpu_kernels import specs
from tpu_kernels.specs import KernelFunction, SpecError, load_specs, packaged_specs_dir, read_spec

GOOD = """\
[kernel]
name = "my-kernel"
module = "my_kernel"
version = 1
summary = "For the tests"

[source]
hub = ""

[capabilities]
dtypes = ["float32", "bfloat16"]
masks = ["none", "ranges"]
max_head_dim = 256
gqa = true
v_head_dim_may_differ = false
softcap = false
sinks = false
dropout = false
position_bias = false
gradients = false
devices = ["tpu", "cpu"]
generations = ["v5e", "v6e"]

[functions.forward]

[functions.decode]
max_packed_rows = 64
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "spec.toml").write_text(text, encoding="utf-8")
    return folder


def replaced(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


def test_good_spec(tmp_path):
    spec = read_spec(write(tmp_path / "k", GOOD))
    assert (spec.name, spec.module, spec.version, spec.summary) == ("my-kernel", "my_kernel", 1, "For the tests")
    assert spec.source.hub == "" and spec.folder == (tmp_path / "k").resolve()
    assert spec.capabilities.dtypes == ("float32", "bfloat16") and spec.capabilities.max_head_dim == 256
    assert spec.functions == (KernelFunction("forward"), KernelFunction("decode", 64))
    assert hash(spec) == hash(read_spec(tmp_path / "k"))


def test_source_table_may_be_left_out(tmp_path):
    assert read_spec(write(tmp_path / "k", replaced('[source]\nhub = ""\n', ""))).source.hub == ""


@pytest.mark.parametrize(
    ("pin", "expected"),
    [
        ("version = 2", ("", 2)),
        (f'revision = "{COMMIT}"', (COMMIT, 0)),
        (f'revision = "{COMMIT}"\nversion = 2', (COMMIT, 2)),
    ],
)
def test_hub_source(tmp_path, pin, expected):
    source = read_spec(write(tmp_path / "k", replaced('hub = ""', f'hub = "acme/my-kernel"\n{pin}'))).source
    assert (source.hub, source.revision, source.version) == ("acme/my-kernel", *expected)


# (what is wrong, text, what the message must name besides the file)
BAD = [
    ("not TOML", "[kernel", ["valid TOML"]),
    ("unknown table", GOOD + "\n[extras]\n", ["the file", "extras", "capabilities, functions, kernel, source"]),
    ("table is a value", replaced("[functions.forward]\n", "[functions]\nforward = 3\n"), ["functions.forward = 3"]),
    ("kernel is a value", "kernel = 3\n" + GOOD.partition("[source]")[2].join(["[source]", ""]), ["kernel = 3", "table"]),
    ("no kernel table", GOOD.partition("[source]")[1] + GOOD.partition("[source]")[2], ["[kernel]", "name (str)"]),
    ("kernel key missing", replaced('module = "my_kernel"\n', ""), ["[kernel]", "module (str)"]),
    ("unknown kernel key", replaced("version = 1", "version = 1\na = 1"), ["[kernel]", "unknown a", "summary, version"]),
    ("name not a str", replaced('name = "my-kernel"', "name = 7"), ["kernel.name", "7", "str"]),
    ("name not a kernel name", replaced('"my-kernel"', '"My_Kernel"'), ["kernel.name", "'My_Kernel'", "lower-case"]),
    ("module no identifier", replaced('"my_kernel"', '"my-kernel.x"'), ["kernel.module", "'my-kernel.x'", "identifier"]),
    ("version a str", replaced("version = 1", 'version = "1"'), ["kernel.version", "'1'", "int"]),
    ("version a bool", replaced("version = 1", "version = true"), ["kernel.version", "True", "int"]),
    ("on_request a str", replaced("version = 1", 'version = 1\non_request = "yes"'), ["kernel.on_request", "'yes'", "bool"]),
    ("version negative", replaced("version = 1", "version = -1"), ["kernel.version", "-1", "at least 0"]),
    ("capability missing", replaced("sinks = false\n", ""), ["[capabilities]", "sinks (bool)"]),
    ("unknown capability", replaced("sinks = false", "sinks = false\nfast = 1"), ["[capabilities]", "fast", "gqa"]),
    ("capability not a bool", replaced("gqa = true", 'gqa = "yes"'), ["capabilities.gqa", "'yes'", "bool"]),
    ("dtypes not a list", replaced('["float32", "bfloat16"]', '"float32"'), ["capabilities.dtypes", "'float32'", "list"]),
    ("unknown dtype", replaced('"bfloat16"]', '"int8"]'), ["capabilities.dtypes", "'int8'", "float32, bfloat16"]),
    ("dtype not a str", replaced('"bfloat16"]', "16]"), ["capabilities.dtypes", "16", "float32, bfloat16"]),
    ("no dtypes", replaced('["float32", "bfloat16"]', "[]"), ["capabilities.dtypes", "empty", "float32, bfloat16"]),
    ("unknown mask", replaced('"ranges"]', '"ragged"]'), ["capabilities.masks", "'ragged'", "ranges+validity"]),
    ("unknown device", replaced('"cpu"]', '"cuda"]'), ["capabilities.devices", "'cuda'", "tpu, cpu"]),
    ("unknown generation", replaced('"v6e"]', '"v9"]'), ["capabilities.generations", "'v9'", "v5p, v6e, tpu7x"]),
    ("head dim a float", replaced("256", "256.0"), ["capabilities.max_head_dim", "256.0", "int"]),
    ("head dim zero", replaced("256", "0"), ["capabilities.max_head_dim", "0", "at least 1"]),
    ("unknown source key", replaced('hub = ""', 'hub = ""\nbranch = "x"'), ["[source]", "hub, revision, trusted, version"]),
    ("hub without a pin", replaced('hub = ""', 'hub = "a/b"'), ["source.hub", "'a/b'", "source.revision", "source.version"]),
    ("hub not ASCII", replaced('hub = ""', 'hub = "a/ä"\nversion = 1'), ["source.hub", "'a/ä'", "org/name"]),
    ("hub a path", replaced('hub = ""', 'hub = "a/../b"\nversion = 1'), ["source.hub", "'a/../b'", "org/name"]),
    ("hub no repository", replaced('hub = ""', 'hub = "b"\nversion = 1'), ["source.hub", "'b'", "org/name"]),
    ("revision a branch", replaced('hub = ""', 'hub = "a/b"\nrevision = "main"'), ["source.revision", "'main'", "40 or 64"]),
    ("source version negative", replaced('hub = ""', "version = -2"), ["source.version", "-2", "at least 0"]),
    ("source version a str", replaced('hub = ""', 'version = "v1"'), ["source.version", "'v1'", "int"]),
    ("dense masks alone", replaced('"ranges"]', '"ranges", "dense_bool"]'), ["'dense_bool'", "[functions.forward_dense]"]),
    ("not without a mask", replaced('"none", ', ""), ["capabilities.masks", 'lacks "none"']),
    ("decode without ranges", replaced('"none", "ranges"', '"none"'), ["[functions.decode]", '"ranges"']),
    ("validity without ranges", replaced('"ranges"]', '"ranges+validity"]'), ["capabilities.masks", 'needs "ranges"']),
    ("dropout", replaced("dropout = false", "dropout = true"), ["capabilities.dropout", "must be false"]),
    ("bias", replaced("position_bias = false", "position_bias = true"), ["capabilities.position_bias", "must be false"]),
    ("length multiple 0", replaced("= 256", "= 256\nlength_multiple = 0"), ["capabilities.length_multiple", "at least 1"]),
    ("no forward", replaced("[functions.forward]\n", ""), ["[functions.forward]", "forward"]),
    ("gradients without backward", replaced("gradients = false", "gradients = true"), ["gradients", "[functions.backward]"]),
    ("no functions", GOOD.partition("[functions.forward]")[0], ["[functions.forward]", "forward"]),
    ("function unknown", GOOD + "\n[functions.prefill]\n", ["[functions.prefill]", "forward_with_lse, backward"]),
    ("unknown function key", replaced("max_packed_rows = 64", "rows = 64"), ["[functions.decode]", "max_packed_rows"]),
    ("packed rows a str", replaced("= 64", '= "64"'), ["functions.decode.max_packed_rows", "'64'", "int"]),
    ("packed rows negative", replaced("= 64", "= -1"), ["functions.decode.max_packed_rows", "-1", "at least 0"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "named"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_spec_names_file_key_value_and_what_is_allowed(tmp_path, text, named):
    folder = write(tmp_path / "k", text)
    with pytest.raises(SpecError) as caught:
        read_spec(folder)
    message = str(caught.value)
    assert str(folder / "spec.toml") in message
    assert [part for part in named if part not in message] == []


def test_missing_spec(tmp_path):
    with pytest.raises(SpecError, match=r"spec\.toml cannot be read: No such file"):
        read_spec(tmp_path)


def test_spec_that_is_not_text(tmp_path):
    (tmp_path / "spec.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match=r"spec\.toml is not valid TOML"):
        read_spec(tmp_path)


def test_folder_of_specs_is_read_in_order_of_name(tmp_path):
    for name in ("zeta", "alpha"):
        write(tmp_path / name, replaced('"my-kernel"', f'"{name}"'))
    (tmp_path / "not-a-kernel").mkdir()
    assert [spec.name for spec in load_specs(tmp_path)] == ["alpha", "zeta"]


def test_packaged_specs_fit_their_folders():
    specs = load_specs()
    assert "range-attention" in [spec.name for spec in specs]
    for spec in specs:
        assert spec.folder == packaged_specs_dir() / spec.name
        assert (spec.folder / "torch-ext" / spec.module / "__init__.py").is_file()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """load_specs() with TPU_KERNELS_SPECS, and without what is packaged being read anew each time."""

    def load(*entries: object):
        monkeypatch.setenv("TPU_KERNELS_SPECS", os.pathsep.join(map(str, entries)))
        return load_specs()

    return load


def kernel(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write(folder / name, replaced('"my-kernel"', f'"{name}"'))


def test_kernels_of_the_environment_come_after_the_packaged_ones(tmp_path, installed):
    packaged = [spec.name for spec in load_specs(packaged_specs_dir())]
    kernel(tmp_path / "some", "alpha"), kernel(tmp_path / "some", "beta"), kernel(tmp_path, "alone")
    specs = installed(tmp_path / "alone" / "spec.toml", tmp_path / "some", "")
    assert [spec.name for spec in specs] == [*packaged, "alone", "alpha", "beta"]
    assert specs[-1].found_by == f"TPU_KERNELS_SPECS={tmp_path / 'some'}"
    assert specs[0].found_by == "packaged with tpu-kernels"
    assert [spec.name for spec in installed(tmp_path / "alone")][-1] == "alone"


def test_two_kernels_of_one_name(tmp_path, installed):
    first, second = kernel(tmp_path / "a", "alpha"), kernel(tmp_path / "b", "alpha")
    with pytest.raises(SpecError, match="two kernels are named 'alpha'") as caught:
        installed(tmp_path / "a", tmp_path / "b")
    assert str(first / "spec.toml") in str(caught.value) and str(second / "spec.toml") in str(caught.value)
    own = kernel(tmp_path / "c", "range-attention")
    with pytest.raises(SpecError, match="packaged with tpu-kernels") as caught:
        installed(own)
    assert str(own / "spec.toml") in str(caught.value)


@pytest.mark.parametrize("entry", ["nowhere", "empty", "file.toml"])
def test_an_entry_without_kernels(tmp_path, installed, entry):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.toml").write_text(GOOD)
    with pytest.raises(SpecError, match=r"TPU_KERNELS_SPECS=.*Name a spec\.toml, a kernel folder, or a folder of") as caught:
        installed(tmp_path / entry)
    assert str(tmp_path / entry) in str(caught.value)


@pytest.mark.parametrize("link", ["torch-ext", "torch-ext/my_kernel", "torch-ext/my_kernel/secret.py"])
def test_links_do_not_lead_out_of_the_folder(tmp_path, link):
    folder, outside = write(tmp_path / "k", GOOD), tmp_path / "outside"
    (outside / "my_kernel").mkdir(parents=True)
    (outside / "secret.py").write_text("")
    (folder / link).parent.mkdir(parents=True, exist_ok=True)
    (folder / link).symlink_to(outside / "secret.py" if link.endswith(".py") else outside)
    with pytest.raises(SpecError, match="leads out of the kernel's folder") as caught:
        read_spec(folder)
    assert str(outside) in str(caught.value)


@pytest.fixture
def install_package(tmp_path, monkeypatch):
    """A package on sys.path that fails when it is imported, and its entry point."""

    def install(value: str = "acme_kernels.specs") -> Path:
        site = tmp_path / "site"
        (site / "acme_kernels").mkdir(parents=True)
        (site / "acme_kernels" / "__init__.py").write_text("raise RuntimeError('imported')\n")
        info = site / "acme_kernels-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[tpu_kernels.specs]\nacme = {value}\n")
        monkeypatch.syspath_prepend(str(site))
        specs._installed.cache_clear()
        return kernel(site / "acme_kernels" / "specs", "acme-attention")

    yield install
    specs._installed.cache_clear()


def test_kernels_of_installed_packages_are_found_without_importing_them(install_package, installed):
    folder = install_package()
    spec = installed()[-1]
    assert (spec.name, spec.folder) == ("acme-attention", folder.resolve())
    assert spec.found_by == "entry point acme = 'acme_kernels.specs' of acme-kernels 1.2"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("acme_kernels.nowhere", "no such folder in an installed package"),
        ("no_such_package", "no such folder in an installed package"),
        ("acme_kernels:specs", 'must be "package" or "package.folder"'),
        ("acme_kernels", "neither spec.toml nor <kernel>/spec.toml"),
    ],
)
def test_an_entry_point_that_names_no_kernels(install_package, installed, value, says):
    folder = install_package(value)
    if value == "acme_kernels":
        (folder / "spec.toml").unlink()
    with pytest.raises(SpecError) as caught:
        installed()
    assert says in str(caught.value) and f"entry point acme = '{value}' of acme-kernels 1.2" in str(caught.value)
