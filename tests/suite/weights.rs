//! Weights from safetensors files: memory has the bytes of the files, and a malformed file allocates no memory.

use std::{
    fs::OpenOptions,
    num::NonZero,
    os::unix::fs::{FileExt, symlink},
    panic::{AssertUnwindSafe, catch_unwind},
    time::SystemTime,
};

use nix::{sys::stat::Mode, unistd::mkfifo};
use vmmfd::{
    Result,
    error::WeightsError,
    weights::{ALIGNMENT, Checkpoint, LoadOptions},
};
use vmmfd_cli::check::files;

use crate::support::{prelude::*, sealing};

cases! {
    on crate::support::Subject; every backend: [
    tensors_match_the_files,
    failed_step_leaves_nothing,
    a_panic_ends_a_load,
    files_that_change_meanwhile_are_noticed,
    ]
}

/// A tensor of a file: its entry in the header, and its bytes.
pub(crate) struct Written {
    name: &'static str,
    dtype: &'static str,
    shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) fn tensor(name: &'static str, dtype: &'static str, shape: &[u64], size: usize) -> Written {
    let begin = name.bytes().map(usize::from).sum::<usize>();
    let bytes = (0..size).map(|at| ((at + begin) % 251) as u8).collect();
    Written { name, dtype, shape: shape.to_vec(), bytes }
}

/// Writes a file like any other program.
pub(crate) fn write(path: &Path, tensors: &[Written], metadata: Value) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    if !metadata.is_null() {
        header.insert("__metadata__".to_owned(), metadata);
    }
    for Written { name, dtype, shape, bytes } in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert((*name).to_owned(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend_from_slice(bytes);
    }
    write_raw(path, &Value::Object(header).to_string(), &data);
}

fn write_raw(path: &Path, header: &str, data: &[u8]) {
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.write_all(data).unwrap();
}

/// A sparse file of one tensor with `size` bytes.
pub(crate) fn large(path: &Path, size: u64) {
    write_raw(path, &json!({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).to_string(), &[]);
    let file = OpenOptions::new().write(true).open(path).unwrap();
    let end = file.metadata().unwrap().len() + size;
    file.set_len(end).unwrap();
}

fn threads(count: usize) -> LoadOptions {
    LoadOptions::new().threads(NonZero::new(count).unwrap())
}

/// Two files with tensors of many types. Some tensors cross the boundaries of read blocks and segments.
fn two_files(folder: &Path) -> Vec<Written> {
    let first = vec![
        tensor("f32", "F32", &[3, 5], 60),
        tensor("empty", "BF16", &[0, 7], 0),
        tensor("bool", "BOOL", &[3], 3),
        tensor("large", "U8", &[5_000_001], 5_000_001),
        tensor("f8", "F8_E4M3", &[2, 2], 4),
        tensor("f8e5m2", "F8_E5M2", &[1], 1),
        tensor("f8e8m0", "F8_E8M0", &[1], 1),
    ];
    let second = vec![
        tensor("scalar", "I64", &[], 8),
        tensor("half", "F16", &[300], 600),
        tensor("bf16", "BF16", &[1000, 1000], 2_000_000),
        tensor("complex", "C64", &[2], 16),
    ];
    write(&folder.join("b.safetensors"), &second, json!({"format": "pt", "epoch": "2"}));
    write(&folder.join("a.safetensors"), &first, json!({"format": "pt", "epoch": "1", "only": "a"}));
    first.into_iter().chain(second).collect()
}

fn tensors_match_the_files(subject: Subject) {
    let folder = tempfile::tempdir().unwrap();
    let written = two_files(folder.path());
    let checkpoint = Checkpoint::open([folder.path()]).unwrap();
    let expected = json!({"format": "pt", "epoch": {"a.safetensors": "1", "b.safetensors": "2"}, "only": "a"});
    assert_eq!(Value::Object(checkpoint.metadata().clone()), expected);
    let device = subject.device();
    for options in [threads(1), threads(3).digest(), threads(40).chunk(subject.unit()).digest()] {
        let mut seen = Vec::new();
        let loaded = checkpoint.load(&device, &options, &mut |done| {
            seen.push(done);
            Ok(())
        });
        let loaded = loaded.unwrap();
        assert!(seen.is_sorted() && seen.last() == Some(&checkpoint.size()), "{seen:?}");
        let memory = &loaded.memory;
        assert!(memory.size() >= checkpoint.size() && memory.size() == memory.mapped_size());
        let mut bytes = vec![1; memory.size() as usize];
        memory.copy_out(0, &mut bytes).unwrap();
        let mut zeros = bytes.clone();
        for (tensor, written) in checkpoint.tensors().iter().zip(&written) {
            assert_eq!((tensor.name.as_str(), &tensor.array.shape), (written.name, &written.shape));
            assert_eq!(tensor.array.offset % ALIGNMENT, 0, "{}", tensor.name);
            let range = tensor.array.offset as usize..tensor.array.offset as usize + written.bytes.len();
            assert!(bytes[range.clone()] == written.bytes, "{} differs", tensor.name);
            zeros[range].fill(0);
        }
        assert!(zeros.iter().all(|byte| *byte == 0), "there is something between the tensors");
        let digest = files::read(memory, 0, 0..memory.size(), &mut |_| Ok(())).unwrap();
        assert!(loaded.digest.is_none_or(|found| found == digest), "the digest is not that of the memory");
        let segments = memory.describe().unwrap().segments();
        let several = options == threads(40).chunk(subject.unit()).digest();
        assert_eq!(segments, if several { memory.size() / subject.unit() } else { 1 });
    }
    subject.assert_empty();
}

fn failed_step_leaves_nothing(subject: Subject) {
    let folder = tempfile::tempdir().unwrap();
    two_files(folder.path());
    let checkpoint = Checkpoint::open([folder.path()]).unwrap();
    let device = subject.device();
    let options = threads(2).chunk(subject.unit()).sealed();
    let failed = subject.fail_each_call(|| sealing(|| checkpoint.load(&device, &options, &mut |_| Ok(())).map(drop)));
    for verb in ["page_lock", "create", "copy_in", "export"] {
        assert!(failed.contains(&verb), "{verb}: {failed:?}");
    }
}

fn a_panic_ends_a_load(subject: Subject) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    large(&path, 40 << 20);
    let checkpoint = Checkpoint::open([&path]).unwrap();
    let device = subject.device();
    let load = |progress: &mut dyn FnMut(u64) -> Result<()>| {
        let loaded = catch_unwind(AssertUnwindSafe(|| checkpoint.load(&device, &threads(3), progress)));
        assert!(loaded.is_err(), "there was no panic");
        subject.assert_empty();
    };
    // A panic in a reader thread, in this thread while readers wait for memory, and in the caller's own code.
    for verb in ["page_lock", "copy_in", "create"] {
        subject.faulty.panic_in(Some(verb));
        load(&mut |_| Ok(()));
    }
    subject.faulty.panic_in(None);
    load(&mut |_| panic!("the caller's own"));
}

fn files_that_change_meanwhile_are_noticed(subject: Subject) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    subject.faulty.slow_down("copy_in", Duration::from_millis(30));
    let shrink = |file: &File| file.set_len(1000).unwrap();
    let touch = |file: &File| file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    let write = |file: &File| {
        // Restore the modification time.
        let modified = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(b"other", 30 << 20).unwrap();
        file.set_modified(modified).unwrap();
    };
    for change in [&shrink as &dyn Fn(&File), &touch, &write] {
        large(&path, 40 << 20);
        let checkpoint = Checkpoint::open([&path]).unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let mut changed = false;
        let ended = checkpoint.load(&subject.device(), &threads(2), &mut |_| {
            if !std::mem::replace(&mut changed, true) {
                change(&file);
            }
            Ok(())
        });
        assert!(changed && matches!(&ended, Err(Error::Weights(WeightsError::Changed { .. }))), "{ended:?}");
        subject.assert_empty();
    }
    // A change before the load is detected too.
    large(&path, 1 << 20);
    let checkpoint = Checkpoint::open([&path]).unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(10).unwrap();
    let ended = checkpoint.load(&subject.device(), &threads(2), &mut |_| Ok(()));
    assert!(matches!(&ended, Err(Error::Weights(WeightsError::Changed { .. }))), "{ended:?}");
    subject.assert_empty();
}

/// Returns the error message for these paths.
#[track_caller]
fn refusal(paths: &[&Path]) -> String {
    let error = Checkpoint::open(paths).unwrap_err();
    assert!(matches!(error, Error::Weights(_)) && error.kind() == ErrorKind::Usage, "{error:?}");
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}

#[test]
fn a_file_that_lies_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    let f32s =
        |count: u64, start: u64, end: u64| json!({"dtype": "F32", "shape": [count], "data_offsets": [start, end]});
    let last = u64::MAX;
    for (header, data, words) in [
        (json!({"a": f32s(2, 0, 8), "b": f32s(2, 4, 12)}), 12, "\"b\" starts at byte 4, inside \"a\", which ends at 8"),
        (
            json!({"a": f32s(2, 0, 8), "b": f32s(1, 12, 16)}),
            16,
            "the bytes 8 to 12, before tensor \"b\", belong to no tensor",
        ),
        (json!({"a": f32s(2, 0, 8)}), 20, "its last 12 bytes belong to no tensor"),
        (json!({"a": f32s(2, 0, 8)}), 7, "the bytes 0 to 8, but only 7 bytes follow"),
        (json!({"a": f32s(2, last - 7, last)}), 8, "but only 8 bytes follow"),
        (json!({"a": f32s(2, 8, 0)}), 8, "before its start"),
        (json!({"a": f32s(3, 0, 8)}), 8, "do not match F32 [3]"),
        (json!({"a": {"dtype": "F32", "shape": [last, 2], "data_offsets": [0, 8]}}), 8, "do not match"),
        (
            json!({"a": {"dtype": "F32", "shape": [1u64 << 40, 1u64 << 40, 0], "data_offsets": [0, 8]}}),
            8,
            "do not match",
        ),
        (json!({"a": {"dtype": "U8", "shape": vec![1; 65], "data_offsets": [0, 1]}}), 1, "65 dimensions"),
        (json!({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}), 1, "smaller than a byte"),
        (json!({"a": {"dtype": "F1", "shape": [2], "data_offsets": [0, 1]}}), 1, "unknown variant"),
        (json!({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}), 1, "invalid header"),
        (json!({"a": 7}), 0, "invalid header"),
        (json!({"__metadata__": {"n": 1}}), 0, "invalid header"),
        (json!({}), 0, "nothing to load"),
        (json!({"a": f32s(0, 0, 0)}), 0, "nothing to load"),
    ] {
        write_raw(&path, &header.to_string(), &vec![0; data]);
        let said = refusal(&[&path]);
        assert!(said.contains(words), "{header}: no {words:?} in {said}");
        assert!(said.starts_with(path.to_str().unwrap()), "{said}");
    }
    for (bytes, words) in [
        (&b""[..], "has 0 bytes"),
        (b"1234567", "has 7 bytes"),
        (&[255; 100], "is not a safetensors file: it does not begin with the length of a header"),
        (
            b"\x08\0\0\0\0\0\0\0{}",
            "is not a safetensors file, or incomplete: its header claims 8 bytes, but only 2 bytes follow",
        ),
        (b"\x02\0\0\0\0\0\0\0\xff\xfe", "invalid header"),
        (br#"!_______{"a":1}"#, "is not a safetensors file"),
    ] {
        fs::write(&path, bytes).unwrap();
        let said = refusal(&[&path]);
        assert!(said.contains(words), "no {words:?} in {said}");
    }
    let one = r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    for twice in [format!(r#"{{"a":{one},"a":{one}}}"#), r#"{"__metadata__":{"a":"1","a":"2"}}"#.to_owned()] {
        write_raw(&path, &twice, b"1");
        assert!(refusal(&[&path]).contains("\"a\" twice"), "{}", refusal(&[&path]));
    }
}

/// Changes each byte of a header to several other values: the file is read, or refused with a message.
#[test]
fn no_header_does_harm() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    write(&path, &[tensor("a", "F32", &[2], 8), tensor("b", "U8", &[1, 3], 3)], json!({"format": "pt"}));
    let whole = fs::read(&path).unwrap();
    for at in 0..whole.len() - 11 {
        for byte in [0, 1, 0xff, b'0', b'9', b'"', b'{', b'}', b',', b'-', b'e'] {
            let mut changed = whole.clone();
            changed[at] = byte;
            fs::write(&path, &changed).unwrap();
            if let Err(error) = Checkpoint::open([&path]) {
                assert!(matches!(error, Error::Weights(_)), "{error:?}");
            }
        }
    }
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        refusal(&[&path]);
    }
}

#[test]
fn only_existing_regular_files_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let [pipe, absent, folder_named_so, linked] =
        ["pipe.safetensors", "absent.safetensors", "folder.safetensors", "linked.safetensors"]
            .map(|name| folder.path().join(name));
    mkfifo(&pipe, Mode::from_bits_truncate(0o600)).unwrap();
    assert!(refusal(&[&pipe]).contains("not a regular file"));
    assert!(refusal(&[Path::new("/dev/zero")]).contains("not a regular file"));
    assert!(refusal(&[&absent]).contains("does not exist"));
    assert!(matches!(Checkpoint::open([&absent]), Err(Error::Weights(WeightsError::Absent { named_by: None, .. }))));
    fs::create_dir(&folder_named_so).unwrap();
    assert!(refusal(&[&folder_named_so]).contains("no file whose name ends with .safetensors"));
    // Files inside a folder are checked the same way.
    assert!(refusal(&[folder.path()]).contains("not a regular file"));
    fs::remove_file(&pipe).unwrap();
    assert!(refusal(&[folder.path()]).contains("not a regular file"));
    for path in ["a\0b", &"n".repeat(300)] {
        let said = Checkpoint::open([path]).unwrap_err().to_string();
        assert!(said.contains("is not a valid path"), "{said}");
    }
    symlink(&absent, &linked).unwrap();
    assert!(refusal(&[&linked]).contains("does not exist"));
    assert!(matches!(Checkpoint::open(<[&Path; 0]>::default()), Err(Error::Misuse { .. })));
    if !nix::unistd::geteuid().is_root() {
        fs::write(&absent, b"").unwrap();
        fs::set_permissions(&absent, fs::Permissions::from_mode(0o000)).unwrap();
        assert!(matches!(Checkpoint::open([&absent]), Err(Error::Weights(WeightsError::Denied { .. }))));
    }
}

/// A folder of two shards with an index of their tensors.
struct Shards {
    folder: TempDir,
}

impl Shards {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        write(&folder.path().join("m-1.safetensors"), &[tensor("a", "U8", &[3], 3)], Value::Null);
        write(&folder.path().join("m-2.safetensors"), &[tensor("b", "U8", &[3], 3)], Value::Null);
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn index(&self, map: &[(&str, &str)]) -> PathBuf {
        let map: BTreeMap<_, _> = map.iter().copied().collect();
        self.write_index(&json!({"metadata": {"total_size": 6}, "weight_map": map}).to_string())
    }

    fn write_index(&self, text: &str) -> PathBuf {
        let path = self.path("m.safetensors.index.json");
        fs::write(&path, text).unwrap();
        path
    }
}

const BOTH: [(&str, &str); 2] = [("a", "m-1.safetensors"), ("b", "m-2.safetensors")];

#[test]
fn index_selects_the_files() {
    let shards = Shards::new();
    let names = |paths: &[&Path]| {
        let checkpoint = Checkpoint::open(paths).unwrap();
        checkpoint.tensors().iter().map(|tensor| tensor.name.clone()).collect::<Vec<String>>()
    };
    let folder = shards.folder.path();
    assert_eq!(names(&[folder]), ["a", "b"]);
    // Another file, and a leftover of an interrupted copy.
    write(&shards.path("adapter.safetensors"), &[tensor("b", "U8", &[2], 2)], Value::Null);
    fs::write(shards.path("._m-1.safetensors"), b"junk").unwrap();
    let said = refusal(&[folder]);
    assert!(said.contains("has a tensor \"b\", and so does") && said.contains("adapter.safetensors"), "{said}");
    let index = shards.index(&BOTH);
    assert_eq!(names(&[folder]), ["a", "b"]);
    assert_eq!(names(&[&index]), ["a", "b"]);
    assert_eq!(names(&[&shards.path("m-2.safetensors"), &shards.path("m-1.safetensors")]), ["b", "a"]);
    let first = shards.path("m-1.safetensors");
    assert!(refusal(&[&first, &first]).contains("tensor names must be unique"));
    assert!(refusal(&[folder, &first]).contains("tensor names must be unique"));
    fs::copy(&index, shards.path("other.safetensors.index.json")).unwrap();
    assert!(refusal(&[folder]).contains("several indexes"));
    assert_eq!(names(&[&index]), ["a", "b"]);
}

#[test]
fn mismatched_index_is_refused() {
    let shards = Shards::new();
    for (map, words) in [
        (&[("a", "m-1.safetensors"), ("b", "m-3.safetensors")][..], "m-3.safetensors does not exist, and"),
        (&[("a", "m-1.safetensors"), ("b", "m-1.safetensors")], "has no tensor \"b\""),
        (&[("a", "m-1.safetensors"), ("b", "m-2.safetensors"), ("c", "m-2.safetensors")], "has no tensor \"c\""),
        (&[("a", "m-2.safetensors"), ("b", "m-1.safetensors")], "does not list in this file"),
        (&[("a", "m-1.safetensors"), ("x", "m-2.safetensors")], "has a tensor \"b\", which"),
        (&[("a", "../m-1.safetensors")], "not the name of a file in its folder"),
        (&[("a", "/etc/passwd")], "not the name of a file in its folder"),
        (&[("a", "..")], "not the name of a file in its folder"),
        (&[("a", "")], "not the name of a file in its folder"),
        (&[("a", "m-1.safetensors\0")], "not the name of a file in its folder"),
        (&[], "lists no tensors"),
    ] {
        let index = shards.index(map);
        let said = refusal(&[&index]);
        assert!(said.contains(words), "{map:?}: no {words:?} in {said}");
        assert_eq!(refusal(&[shards.folder.path()]), said);
    }
    for (text, words) in [
        ("", "is not an index"),
        ("[]", "is not an index"),
        (r#"{"weight_map": {"a": 1}}"#, "is not an index"),
        (r#"{"weight_map": {"a": "m-1.safetensors", "a": "m-2.safetensors"}}"#, "\"a\" twice"),
        (r#"{"a": "m-1.safetensors"}"#, "missing field"),
    ] {
        let said = refusal(&[&shards.write_index(text)]);
        assert!(said.contains(words), "{text}: no {words:?} in {said}");
    }
    let index = shards.index(&BOTH);
    OpenOptions::new().write(true).open(&index).unwrap().set_len(1 << 40).unwrap();
    assert!(refusal(&[&index]).contains("an index may have at most"));
    fs::remove_file(&index).unwrap();
    mkfifo(&index, Mode::from_bits_truncate(0o600)).unwrap();
    assert!(refusal(&[&index]).contains("not a regular file"));
}
