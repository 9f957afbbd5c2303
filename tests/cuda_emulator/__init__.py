"""Runs the CUDA source of a kernel on the CPU, block by block, with every access checked.

The source is what would go to nvcc. Its helpers are single PTX instructions; each becomes a call of
``simt.h``, and the whole a program that AddressSanitizer watches.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_HEADER = Path(__file__).with_name("simt.h")
_ASM = re.compile(r'asm(?: volatile)?\("([^"]*)"\s*:([^:\n]*):([^:\n]*)(?::[^:\n]*)?\);')
_TYPES = {"u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t", "s32": "int32_t", "f32": "float"}
_SIZES = {"u8": 1, "u16": 2}


def compiler() -> str | None:
    """Path of a C++ compiler, None if there is none."""
    return shutil.which("g++") or shutil.which("c++")


def _operand(text: str) -> str:
    """The type of an instruction's halves, as ``simt.h`` names it."""
    return "nv_bfloat16" if ".bf16" in text else "half"


def _translate(match: re.Match[str]) -> str:
    """One instruction as a call."""
    text = match[1].rstrip(";")
    operands = re.findall(r'"=?\+?[a-z]"\((\w+)\)', match[2] + match[3])
    if product := re.search(r"wgmma\.mma_async\S* \{([^}]*)\}, \{([^}]*)\}, (%\d+)", text):
        sums, a, b = ([operands[int(i)] for i in re.findall(r"%(\d+)", part)] for part in product.groups())
        operands = f"{{{', '.join('&' + name for name in sums)}}}, {', '.join([*a, *b])}"
        return f"simt::start_product<{_operand(text)}>({operands});"

    def named(part: str) -> str:
        return re.sub(r"%(\d+)", lambda m: operands[int(m[1])], part)

    opcode, _, rest = text.partition(" ")
    parts = opcode.split(".")
    values = [named(v) for v in re.findall(r"%\d+", re.sub(r"\[[^]]*\]", "", rest))]
    addresses = [named(a) for a in re.findall(r"\[([^]]*)\]", rest)]
    if parts[0] in ("ld", "st"):
        kind, size = _TYPES[parts[-1]], _SIZES.get(parts[-1], 4) * len(values)
        base, _, offset = addresses[0].partition("+")
        if parts[1] == "shared::cluster":
            place = f"simt::at_cluster({base} + {offset or 0}, {size})"
        elif parts[1] == "shared":
            place = f"simt::at_shared({base} + {offset or 0}, {size})"
        else:
            place = f"const_cast<uchar*>(simt::at_global((const uchar*){base} + {offset or 0}, {size}))"
        call = "load" if parts[0] == "ld" else "store"
        return f"simt::{call}<{kind}>({place}, {', '.join(values)});"
    if opcode.startswith("cp.async.cg"):
        (to, to_offset), (source, offset) = (
            (a.partition("+")[0], a.partition("+")[2] or 0) for a in addresses
        )
        return f"simt::copy_async({to} + {to_offset}, (const uchar*){source} + {offset});"
    if opcode.startswith("cp.async.commit_group"):
        return "simt::copy_commit();"
    if opcode.startswith("cp.async.wait_group"):
        return f"simt::copy_wait({rest});"
    if parts[0] == "wgmma":
        calls = {"fence": ";", "commit_group": "simt::commit_products();"}
        return calls.get(parts[1], f"simt::wait_products({rest});")
    if opcode.startswith("barrier.cluster"):
        return "simt::meet(simt::cluster, simt::cluster_size);" if parts[2] == "wait" else ";"
    if opcode.startswith("ldmatrix"):
        base, _, offset = addresses[0].partition("+")
        return f"simt::load_matrices({base} + {offset or 0}, {', '.join(values)});"
    if "%%" in text:
        return f"{operands[0]} = {'simt::rank()' if text.endswith('ctarank') else 0};"
    if parts[0] in ("fence", "griddepcontrol", "prefetch"):
        return ";"
    if parts[0] == "atom":
        return f"int* p = (int*){addresses[0]}; {values[0]} = *p; *p += {values[1]};"
    simple = {
        "mma": f"simt::mma<{_operand(text)}>({{}});",
        "movmatrix": "simt::transpose({});",
        "prmt": "simt::pick_bytes({});",
        "mov": "{} = {};",
        "mapa": "{} = simt::map_shared({}, {});",
        "lop3": "{} = {} & {} | {};",
    }
    if parts[0] in simple:
        form = simple[parts[0]]
        return form.format(*values) if form.count("{}") > 1 else form.format(", ".join(values))
    if opcode.startswith("ex2"):
        return f"{values[0]} = exp2f({values[1]});"
    if opcode == "cvt.rn.f16x2.f32":
        return f"{values[0]} = simt::as_word<half>({values[2]}, {values[1]});"
    pairs = {"mul": "{1} * {2}", "sub": "{1} - {2}", "fma": "{1} * {2} + {3}"}
    if parts[0] in pairs and parts[1] == "rn" and parts[2] in ("f16x2", "bf16x2"):
        kind = _operand(text)
        low, high = (
            pairs[parts[0]].format(*[f"simt::as_float<{kind}>({value}, {i})" for value in values])
            for i in range(2)
        )
        return f"{values[0]} = simt::as_word<{kind}>({low}, {high});"
    raise NotImplementedError(text)


def build(source: str, directory: Path, shared_bytes: int, threads: int, cluster: int = 1) -> Path:
    """Compile the only kernel of ``source`` into a program; :func:`run` runs it.

    ``cluster`` is the number of blocks, neighbours in x, that run together.
    """
    helpers = "\n".join(
        m[0]
        for m in re.finditer(
            r"^(?:template[^\n]*\n)?__forceinline__ __device__ [^{;]*tvm_builtin.*?^}", source, re.M | re.S
        )
    )
    # what wgmma reads are the registers, not what they hold when it starts
    helpers = re.sub(
        r".*wgmma_\w*mma_async.*", lambda line: line[0].replace("uint32_t __a", "uint32_t& __a"), helpers
    )
    found = re.search(
        r'^extern "C" __global__ void __launch_bounds__\([^)]*\) (\w+)\(([^)]*)\) \{', source, re.M
    )
    assert found is not None, "no kernel"
    body = source[found.end() :]
    body = re.sub(
        r"extern __shared__ __align__\(\d+\) uchar (\w+)\[\];", r"uchar* \1 = simt::shared();", body
    )
    body = re.sub(r"__shared__ (alignas\(\d+\))", r"\1 static", body)
    names = [p.split()[-1] for p in found[2].split(",")]
    types = [" ".join(p.replace("__restrict__", "").split()[:-1]) for p in found[2].split(",")]
    reads = []
    for name, kind in zip(names, types, strict=True):
        if kind.endswith("*"):
            reads.append(f"  size_t {name}_size = strtoull(argv[i++], 0, 10);")
            reads.append(f'  {name} = ({kind})simt::read_array("{name}", {name}_size);')
        else:
            reads.append(f"  {name} = strtoll(argv[i++], 0, 10);")
    writes = [
        f'  simt::write_array("{name}", {name}, {name}_size);'
        for name, kind in zip(names, types, strict=True)
        if kind.endswith("*")
    ]
    declared = "\n".join(f"static {kind} {name};" for name, kind in zip(names, types, strict=True))
    program = f"""#include "{_HEADER}"
{_ASM.sub(_translate, helpers)}
{declared}
static void entry() {{
{body}
int main(int argc, char** argv) {{
  int i = 1;
{chr(10).join(reads)}
  simt::start({threads}, {cluster}, {shared_bytes}, entry);
  for (; i + 2 < argc; i += 3) {{
    simt::block_index.x.first = atoi(argv[i]);
    simt::block_index.y = atoi(argv[i + 1]);
    simt::block_index.z = atoi(argv[i + 2]);
    simt::run_cluster();
  }}
{chr(10).join(writes)}
}}
"""
    code, out = directory / "kernel.cpp", directory / "kernel"
    code.write_text(program)
    flags = ["-std=c++17", "-O1", "-g0", "-w", "-mf16c", "-mavx2", "-fno-strict-aliasing"]
    flags += ["-fsanitize=address", "--param", "asan-stack=0"]
    done = subprocess.run(
        [compiler() or "g++", *flags, "-o", out, code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[:2000]
    out.with_suffix(".args").write_text("\n".join(names))
    return out


def run(
    program: Path, arguments: dict[str, np.ndarray | int], blocks: Sequence[tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Run the program's blocks in the order given.

    Parameters
    ----------
    arguments : dict
        By the names in the source; arrays under ``NAME_ptr``.
    blocks : sequence of (x, y) or (x, y, z)
        The first of each cluster.

    Returns
    -------
    dict
        The arrays afterwards.
    """
    names = program.with_suffix(".args").read_text().split()
    words = []
    for name in names:
        value = arguments[name]
        if isinstance(value, np.ndarray):
            np.ascontiguousarray(value).tofile(program.parent / name)
            words.append(str(value.nbytes))
        else:
            words.append(str(value))
    words += [str(i) for block in blocks for i in (*block, 0)[:3]]
    done = subprocess.run([program, *words], cwd=program.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    arrays = {n: v for n, v in arguments.items() if isinstance(v, np.ndarray) and n in names}
    return {n: np.fromfile(program.parent / n, v.dtype).reshape(v.shape) for n, v in arrays.items()}
