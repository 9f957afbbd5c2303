"""Libraries for other machines: devices and hosts, what kernels may use there, files that are valid."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import tvm

from kvq.cli.main import main
from kvq.compiler.coff import undefined_symbols
from kvq.compiler.compile import library_path
from kvq.compiler.gpu_target import gpu_target
from kvq.compiler.hosts import DEVICE_HOSTS, HOSTS, split_device, this_host
from kvq.compiler.link import linker_for
from kvq.compiler.target import target_for
from kvq.errors import CompileError

ELSEWHERE = [name for name, host in HOSTS.items() if not host.is_here]


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        ("metal", None, ("metal", "macos-arm64")),
        ("cpu:linux-aarch64", None, ("cpu", "linux-aarch64")),
        ("cpu", "windows-x86_64", ("cpu", "windows-x86_64")),
        ("opencl:android", "android", ("opencl", "android")),
        ("android", None, ("vulkan", "android")),
    ],
)
def test_a_device_and_its_host(device, host, expected):
    kind, found = split_device(device, host)
    assert (kind, found.name) == expected


def test_the_host_is_this_one_where_it_can_be():
    for kind, names in DEVICE_HOSTS.items():
        if this_host().name in names:
            assert split_device(kind)[1] == this_host()


@pytest.mark.parametrize(
    ("device", "host", "message"),
    [
        ("toaster", None, "--device 'toaster' cannot be compiled for: use one of cpu, cuda"),
        ("cpu:beos", None, "host 'beos' is unknown: use one of linux-x86_64"),
        ("metal", "linux-x86_64", "metal does not run on linux-x86_64: use metal:macos-arm64"),
        ("cpu:linux-aarch64", "macos-arm64", "name different hosts"),
    ],
)
def test_devices_and_hosts_that_do_not_fit(device, host, message):
    with pytest.raises(CompileError, match=message) as caught:
        split_device(device, host)
    assert "\n" not in str(caught.value)


def test_the_target_decides_what_kernels_use():
    """Not this machine's CPU: instructions of its own would not run elsewhere."""
    windows, arm = HOSTS["windows-x86_64"], HOSTS["linux-aarch64"]
    if not windows.is_here:
        assert target_for("cpu", "O2", host=windows).features == ("avx2", "fma", "f16c")
    assert target_for("cpu", "O2", host=windows, mcpu="x86-64-v4").kernels.isa.dot == "vnni512"
    assert target_for("cpu", "O2", host=windows, mcpu="x86-64").features == ()
    assert target_for("cpu", "O2", host=arm).kernels.isa.dot == "generic"
    for arguments, message in (
        ({"host": arm, "mcpu": "x86-64-v3"}, "goes with x86-64 hosts"),
        ({"host": windows, "mcpu": "pentium"}, "--mcpu 'pentium' is unknown"),
    ):
        with pytest.raises(CompileError, match=message):
            target_for("cpu", "O2", **arguments)
    with pytest.raises(CompileError, match="--mcpu goes with --device cpu"):
        target_for("metal", "O2", host=HOSTS["macos-arm64"], mcpu="x86-64")


def test_the_suffix_is_the_hosts():
    mac, windows = HOSTS["macos-arm64"], HOSTS["windows-x86_64"]
    assert library_path(Path("out/lib"), mac).name == "lib.dylib"
    assert library_path(Path("out/model-1.5"), windows).name == "model-1.5.dll"
    if not windows.is_here:
        assert library_path(Path("lib.so"), windows).name == "lib.dll"
    assert library_path(Path("lib.so"), this_host()).name == "lib.so"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> dict[str, Path]:
    """A kernel that calls mathematics, runs in threads and can fail, as a library of every other host."""
    pytest.importorskip("ziglang")
    directory, made = tmp_path_factory.mktemp("libraries"), {}
    for name in ELSEWHERE:
        target = target_for("cpu", "O2", host=HOSTS[name])
        funcs = {
            "rope_table": target.kernels.rope_table(32, 1.0),
            "gate": target.kernels.gate(96, "silu"),
        }
        module = tvm.IRModule({name: func.with_attr("global_symbol", name) for name, func in funcs.items()})
        built = tvm.compile(module, target=target.target)
        made[name] = library_path(directory / f"lib-{name}", HOSTS[name])
        built.mod.export_library(str(made[name]), fcompile=linker_for(HOSTS[name]))
    return made


_MAGIC = {".so": b"\x7fELF", ".dll": b"MZ", ".dylib": b"\xcf\xfa\xed\xfe"}
_SYMBOLS = {
    ".so": ["llvm-readelf", "--dyn-syms", "-d"],
    ".dll": ["llvm-objdump", "-p"],
    ".dylib": ["llvm-objdump", "--macho", "--exports-trie", "--dylibs-used", "--lazy-bind"],
}


@pytest.mark.parametrize("host", ELSEWHERE)
def test_a_library_for_another_host_is_a_valid_file(libraries, host):
    path = libraries[host]
    assert path.read_bytes().startswith(_MAGIC[path.suffix])
    tool, *options = _SYMBOLS[path.suffix]
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} (Debian: llvm)")
    done = subprocess.run([tool, *options, str(path)], capture_output=True, text=True, check=True)
    for symbol in ("__tvm_ffi_rope_table", "__tvm_ffi_gate", "TVMFFIErrorSetRaisedFromCStrParts"):
        assert symbol in done.stdout
    needed = {".so": "libm.so", ".dll": "tvm_ffi.dll", ".dylib": "/usr/lib/libSystem.B.dylib"}
    names = {".dll": f"DLL name: {path.name}", ".dylib": f"@rpath/{path.name}"}
    assert needed[path.suffix] in done.stdout
    assert names.get(path.suffix, "") in done.stdout


def test_undefined_symbols_of_a_coff_object(tmp_path):
    target = target_for("cpu", "O2", host=HOSTS["windows-x86_64"])
    func = target.kernels.rope_table(32, 1.0).with_attr("global_symbol", "rope_table")
    built = tvm.compile(func, target=target.target)
    built.mod.write_to_file(str(tmp_path / "kernel.o"))
    found = undefined_symbols((tmp_path / "kernel.o").read_bytes())
    assert {"TVMFFIErrorSetRaisedFromCStrParts", "cosf", "sinf"} <= found
    assert not any("rope_table" in name for name in found)


def test_metal_keeps_its_source_in_a_library_for_a_mac(tmp_path):
    pytest.importorskip("ziglang")
    mac = HOSTS["macos-arm64"]
    target = gpu_target("metal", host=mac.options())
    func = target.kernels.gate(96, "silu").with_attr("global_symbol", "gate")
    module = tvm.IRModule({"gate": func})
    built = tvm.compile(module, target=target.target, tir_pipeline=target.tir_pipeline)
    path = tmp_path / "lib.dylib"
    built.mod.export_library(str(path), fcompile=linker_for(mac))
    data = path.read_bytes()
    assert data.startswith(_MAGIC[".dylib"]) and b"kernel void gate_kernel" in data
    assert b"__tvm_ffi__library_bin" in data


def test_a_host_that_nothing_links_for_says_what_to_install(monkeypatch):
    monkeypatch.setattr("kvq.compiler.link.has_zig", lambda: False)
    with pytest.raises(CompileError, match=r"needs the package ziglang: pip install 'kvq\[cross\]'"):
        linker_for(HOSTS[ELSEWHERE[0]])


def test_the_list_of_devices(capsys, monkeypatch):
    monkeypatch.setattr("kvq.compiler.link.has_zig", lambda: False)
    assert main(["compile", "--list-devices"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "kvq[cross]" in lines["metal:macos-arm64"]
    assert lines[f"cpu:{this_host().name}"].split()[1:] == ["yes", "yes"]
    assert "OpenCL runtime" in lines["opencl"]
