"""Packs vLLM for a GPU machine without a network: pack.py FOLDER.

Downloads the wheels of wheels.txt into FOLDER/wheels, unpacks them, deletes the parts that the tests do not use, erases device code for
GPUs other than Hopper, and writes FOLDER/packed/*.tar.xz. All of FOLDER can be deleted; only packed/ is needed on the GPU machine.
"""
import pathlib
import shutil
import struct
import subprocess
import sys
import zipfile

HERE = pathlib.Path(__file__).parent
LIMIT = 47_000_000
# Not used by a dense Llama on Hopper with FlashAttention 3. FlashAttention 2 alone has 305 MB.
UNUSED = [
    "vllm/vllm-rs", "vllm/_rust_tool_parser*", "vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100", "vllm/_deepselect_C*", "vllm/_flashkda_C*", "vllm/_flashmla_*", "vllm/_qutlass_C*",
    "vllm/model_executor/layers/fused_moe/configs/*", "vllm/model_executor/layers/quantization/utils/configs/*",
    "vllm/entrypoints/serve/instrumentator/static/*", "tvm_ffi/include", "*/tests", "bin",
]
# The two libraries with kernels for all GPU families.
PRUNED = ["vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so"]
FAT_BINARY = struct.Struct("<IHHQ")
FAT_MAGIC = 0xBA55ED50
ENTRY = struct.Struct("<HHIQ")
KIND_MACHINE_CODE = 2
ARCHITECTURE_AT = 28


def download(folder):
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                    "--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *platforms,
                    "--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64", "--dest", folder,
                    "--requirement", HERE / "wheels.txt"], check=True)


def unpack(wheels, site):
    shutil.rmtree(site, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for pattern in UNUSED:
        for path in list(site.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def erase_other_gpus(path, keep=90):
    """Zeroes device code and PTX for other GPUs than `keep`. Offsets do not change, so the library still loads, and zeros compress well."""
    data = bytearray(path.read_bytes())
    magic = FAT_MAGIC.to_bytes(4, "little")
    kept = erased = 0
    at = data.find(magic)
    while at >= 0:
        _, version, head, size = FAT_BINARY.unpack_from(data, at)
        end = at + head + size
        if version != 1 or head != FAT_BINARY.size or end > len(data):
            at = data.find(magic, at + 4)
            continue
        entry = at + head
        while entry < end:
            kind, _, entry_head, entry_size = ENTRY.unpack_from(data, entry)
            if entry_head == 0:
                break
            body = entry + entry_head
            (architecture,) = struct.unpack_from("<I", data, entry + ARCHITECTURE_AT)
            if kind == KIND_MACHINE_CODE and architecture == keep:
                kept += entry_size
            else:
                data[body : body + entry_size] = bytes(entry_size)
                erased += entry_size
            entry = body + entry_size
        at = data.find(magic, end)
    path.write_bytes(data)
    print(f"pack: {path.name}: kept {kept >> 10} KiB of device code, erased {erased >> 10} KiB", flush=True)


def archives(site):
    """Returns the files of each archive. Separate archives are packed and unpacked in parallel."""
    files = [path.relative_to(site) for path in site.rglob("*") if path.is_file()]
    groups = {"packages": [], "vllm-python": [], "vllm-native": [], "vllm-attention": []}
    for path in files:
        if not path.parts[0].startswith("vllm"):
            groups["packages"].append(path)
        elif path.suffix != ".so":
            groups["vllm-python"].append(path)
        else:
            groups["vllm-attention" if "vllm_flash_attn" in path.parts else "vllm-native"].append(path)
    return groups


def pack(site, packed):
    shutil.rmtree(packed, ignore_errors=True)
    packed.mkdir(parents=True)
    for name, files in archives(site).items():
        target = packed / f"{name}.tar.xz"
        names = b"\0".join(str(path).encode() for path in sorted(files))
        tar = subprocess.Popen(["tar", "--create", "--null", "--files-from=-", "--sort=name", "--owner=0", "--group=0", "--mtime=@0"],
                               cwd=site, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with open(target, "wb") as out:
            xz = subprocess.Popen(["xz", "-6", "--threads=0"], stdin=tar.stdout, stdout=out)
            tar.stdout.close()
            tar.communicate(names)
            if tar.returncode or xz.wait():
                sys.exit(f"pack: tar or xz failed on {target}")
        print(f"pack: {target.name}: {target.stat().st_size:,} bytes", flush=True)
    total = sum(path.stat().st_size for path in packed.iterdir())
    print(f"pack: {total:,} bytes in {packed}")
    if total > LIMIT:
        sys.exit(f"pack: the archives have {total:,} bytes, more than {LIMIT:,}: delete more in UNUSED")


def main():
    folder = pathlib.Path(sys.argv[1])
    site = folder / "site"
    download(folder / "wheels")
    unpack(folder / "wheels", site)
    for name in PRUNED:
        erase_other_gpus(site / name)
    pack(site, folder / "packed")
    shutil.rmtree(site)


if __name__ == "__main__":
    main()
