//! A checkpoint: the safetensors files of a model, opened and checked.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::{self, File, Metadata},
    io,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::{
    header::{self, Header, Strings},
    layout::Layout,
};
use crate::{
    array::ArrayDescriptor,
    error::{Error, Result, WeightsError},
    sys::above_standard,
    wire::Check,
};

/// The alignment of tensors in memory, in bytes.
pub const ALIGNMENT: u64 = 256;

/// The suffix of an index's name.
const INDEX: &str = ".safetensors.index.json";

/// The largest accepted index, in bytes.
const MAX_INDEX: u64 = 100_000_000;

/// The safetensors files of a model. Tensors have unique names, do not overlap and cover all data of each file.
///
/// Holds no open files, of which a model may have more than a process may open, and no device memory.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<WeightsFile>,
    tensors: Vec<Tensor>,
    pub(super) layout: Layout,
    metadata: Check,
}

/// A tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tensor {
    /// The tensor's name.
    pub name: String,
    /// The element type, the shape, and the offset in the memory that [`Checkpoint::load`] creates: contiguous in C order, at a multiple of
    /// [`ALIGNMENT`]. A tensor without elements has the offset 0.
    pub array: ArrayDescriptor,
}

impl Checkpoint {
    /// Finds files, folders and indexes, and reads the headers. For a folder, reads the files that its `*.safetensors.index.json` lists or,
    /// without an index, all its `*.safetensors`. Blocks while the file system does.
    ///
    /// # Errors
    /// [`Error::Weights`] if a path does not exist, can't be opened or is not a regular file, if a file is corrupt (tensors overlap, leave
    /// gaps or exceed the file; sizes do not match shapes; a name appears twice), if an index does not match the files, or if there are no
    /// bytes of data; [`Error::System`].
    pub fn open(paths: impl IntoIterator<Item = impl AsRef<Path>>) -> Result<Self> {
        let mut files = Vec::new();
        let mut given = false;
        for path in paths {
            given = true;
            find(path.as_ref(), &mut files)?;
        }
        if !given {
            return Err(Error::Misuse { problem: "a checkpoint needs a file or a folder".to_owned() });
        }
        Self::of(files)
    }

    fn of(found: Vec<Found>) -> Result<Self> {
        let mut files = Vec::new();
        let mut entries = Vec::new();
        let mut metadata = BTreeMap::new();
        let mut names: HashMap<String, usize> = HashMap::new();
        for Found { path, named_by, expected } in found {
            let (file, opened) = WeightsFile::open(&path, named_by.as_deref())?;
            let Header { metadata: own, tensors } = file.header(&opened)?;
            let index = files.len();
            for tensor in &tensors {
                if let Some(&other) = names.get(&tensor.name) {
                    let other: &WeightsFile = files.get(other).unwrap_or(&file);
                    let name = &tensor.name;
                    let other = other.path.display();
                    return Err(
                        file.unfit(format!("has a tensor {name:?}, and so does {other}: tensor names must be unique"))
                    );
                }
                names.insert(tensor.name.clone(), index);
            }
            if let Some((index, expected)) = named_by.zip(expected) {
                let names = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
                compare(&index, &file, &expected, &names)?;
            }
            for (name, value) in own {
                metadata.entry(name).or_insert_with(Vec::new).push((index, value));
            }
            entries.extend(tensors.into_iter().map(|tensor| (index, tensor)));
            files.push(file);
        }
        let mut layout = Layout::default();
        let mut tensors = Vec::with_capacity(entries.len());
        for (file, entry) in entries {
            let offset = match entry.bytes {
                0 => Some(0),
                bytes => layout.push(file, entry.offset, bytes, ALIGNMENT),
            };
            let offset = offset.ok_or_else(|| files[file].unfit("is too large for 64 bits".to_owned()))?;
            let array = ArrayDescriptor { dtype: entry.dtype, shape: entry.shape, strides: None, offset };
            tensors.push(Tensor { name: entry.name, array });
        }
        if layout.end() == 0
            && let Some(file) = files.first()
        {
            return Err(file.unfit("has no tensor with elements: there is nothing to load".to_owned()));
        }
        let metadata = merge(metadata, &files);
        Ok(Self { files, tensors, layout, metadata })
    }

    /// All tensors, in the order of the files, and in each file by offset.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The size of the tensors in memory, including the padding between them, in bytes.
    pub fn size(&self) -> u64 {
        self.layout.end()
    }

    /// The paths of the files, in order.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// The merged metadata of the files' headers (`__metadata__`). Each value is a string or, if files differ, an object of strings by file
    /// name.
    pub fn metadata(&self) -> &Check {
        &self.metadata
    }

    /// Fills a slice from a file, which remains open in `open` for the next read.
    pub(super) fn read(
        &self,
        open: &mut Option<(usize, File)>,
        index: usize,
        offset: u64,
        to: &mut [u8],
    ) -> Result<()> {
        let file = &self.files[index];
        let opened = match open.take() {
            Some((of, opened)) if of == index => opened,
            _ => file.reopen()?,
        };
        let (_, opened) = open.insert((index, opened));
        file.read(opened, offset, to)
    }

    /// Fails if a file has changed since its header was read: its tensors would be a mix of old and new bytes.
    pub(super) fn check_unchanged(&self) -> Result<()> {
        self.files.iter().try_for_each(WeightsFile::check_unchanged)
    }
}

/// A file to open.
struct Found {
    path: PathBuf,
    /// The index that lists this file.
    named_by: Option<PathBuf>,
    /// The tensors that an index expects in this file.
    expected: Option<BTreeSet<String>>,
}

/// An index: the file of each tensor.
#[derive(Debug, Deserialize)]
struct Index {
    weight_map: Strings<BTreeMap<String, String>>,
}

fn find(path: &Path, files: &mut Vec<Found>) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let metadata = fs::metadata(path).map_err(|error| unopened(path, None, error))?;
    if metadata.is_dir() {
        return find_in(path, files);
    }
    if name.ends_with(".json") {
        return find_by(path, files);
    }
    files.push(Found { path: path.to_owned(), named_by: None, expected: None });
    Ok(())
}

fn find_in(folder: &Path, files: &mut Vec<Found>) -> Result<()> {
    let unreadable = |error| unopened(folder, None, error);
    let mut indexes = Vec::new();
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let name = entry.map_err(unreadable)?.file_name();
        let text = name.to_string_lossy();
        if text.starts_with('.') {
            continue;
        }
        if text.ends_with(INDEX) {
            indexes.push(folder.join(&name));
        } else if text.ends_with(".safetensors") {
            found.push(folder.join(&name));
        }
    }
    indexes.sort_unstable();
    found.sort_unstable();
    match indexes.as_slice() {
        [index] => return find_by(index, files),
        [] => {}
        [one, other, ..] => {
            let problem = format!("has several indexes ({}, {}): give the path of one", one.display(), other.display());
            return Err(unfit(folder, problem));
        }
    }
    if found.is_empty() {
        return Err(unfit(folder, "has no file whose name ends with .safetensors".to_owned()));
    }
    files.extend(found.into_iter().map(|path| Found { path, named_by: None, expected: None }));
    Ok(())
}

/// Finds the files that an index lists.
fn find_by(index: &Path, files: &mut Vec<Found>) -> Result<()> {
    let (file, opened) = WeightsFile::open(index, None)?;
    if file.size > MAX_INDEX {
        return Err(file.unfit(format!("has {} bytes, and an index may have at most {MAX_INDEX}", file.size)));
    }
    let mut text = vec![0; file.size as usize];
    file.read(&opened, 0, &mut text)?;
    let Index { weight_map: Strings(map) } = serde_json::from_slice(&text)
        .map_err(|error| file.unfit(format!("is not an index of safetensors files: {error}")))?;
    if map.is_empty() {
        return Err(file.unfit("lists no tensors".to_owned()));
    }
    let mut expected: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (tensor, name) in map {
        // Do not leave the folder.
        if matches!(name.as_str(), "" | "." | "..") || name.contains(['/', '\0']) {
            return Err(file.unfit(format!("lists the file {name:?}, which is not the name of a file in its folder")));
        }
        expected.entry(name).or_default().insert(tensor);
    }
    let folder = index.parent().unwrap_or(Path::new(""));
    files.extend(expected.into_iter().map(|(name, tensors)| Found {
        path: folder.join(name),
        named_by: Some(index.to_owned()),
        expected: Some(tensors),
    }));
    Ok(())
}

/// Compares the tensors of a file with an index.
fn compare(index: &Path, file: &WeightsFile, expected: &BTreeSet<String>, names: &BTreeSet<&str>) -> Result<()> {
    let index = index.display();
    if let Some(name) = names.iter().find(|name| !expected.contains(**name)) {
        return Err(file.unfit(format!("has a tensor {name:?}, which {index} does not list in this file")));
    }
    match expected.iter().find(|name| !names.contains(name.as_str())) {
        Some(missing) => Err(file.unfit(format!("has no tensor {missing:?}, which {index} lists in this file"))),
        None => Ok(()),
    }
}

fn merge(metadata: BTreeMap<String, Vec<(usize, String)>>, files: &[WeightsFile]) -> Check {
    let of_all = |values: Vec<(usize, String)>| match values.as_slice() {
        [(_, first), others @ ..] if others.iter().all(|(_, value)| value == first) => first.clone().into(),
        _ => values
            .into_iter()
            .map(|(file, value)| {
                let path = &files[file].path;
                (path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(), value.into())
            })
            .collect::<Check>()
            .into(),
    };
    metadata.into_iter().map(|(name, values)| (name, of_all(values))).collect()
}

/// A regular file, as it was when its header was read.
#[derive(Debug)]
struct WeightsFile {
    path: PathBuf,
    size: u64,
    state: State,
}

/// The data that identify a file and its contents: the device and inode, the size, and the times of the last modification (mtime, which
/// programs can set) and of the last change (ctime, which they can't), each in seconds and nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct State {
    inode: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl State {
    fn of(metadata: &Metadata) -> Self {
        Self {
            inode: (metadata.dev(), metadata.ino()),
            size: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

impl WeightsFile {
    fn open(path: &Path, named_by: Option<&Path>) -> Result<(Self, File)> {
        // Do not block on a FIFO without a writer.
        let file = File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path);
        let file = file.and_then(|file| Ok(File::from(above_standard(file.into())?)));
        let file = file.map_err(|error| unopened(path, named_by, error))?;
        let metadata = file.metadata().map_err(|error| Error::system(format!("inspect {}", path.display()), error))?;
        if !metadata.is_file() {
            return Err(unfit(path, "is not a regular file".to_owned()));
        }
        Ok((Self { path: path.to_owned(), size: metadata.len(), state: State::of(&metadata) }, file))
    }

    /// Opens the file again. Fails if it has changed, or another file has replaced it.
    fn reopen(&self) -> Result<File> {
        let (found, file) = Self::open(&self.path, None)?;
        if found.state == self.state { Ok(file) } else { Err(self.changed()) }
    }

    fn header(&self, opened: &File) -> Result<Header> {
        let Self { size, .. } = *self;
        let mut first = [0; header::LENGTH as usize];
        if size < header::LENGTH {
            return Err(self.unfit(format!(
                "is not a safetensors file: it has {size} bytes, less than the header's length field"
            )));
        }
        self.read(opened, 0, &mut first)?;
        let length = header::size_of(first, size).map_err(|problem| self.unfit(problem))?;
        let mut header = vec![0; length as usize];
        self.read(opened, header::LENGTH, &mut header)?;
        header::read(&header, size).map_err(|problem| self.unfit(problem))
    }

    fn read(&self, opened: &File, offset: u64, to: &mut [u8]) -> Result<()> {
        opened.read_exact_at(to, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.changed(),
            _ => Error::system(format!("read {}", self.path.display()), error),
        })
    }

    fn check_unchanged(&self) -> Result<()> {
        let metadata = fs::metadata(&self.path).map_err(|error| unopened(&self.path, None, error))?;
        if State::of(&metadata) == self.state { Ok(()) } else { Err(self.changed()) }
    }

    fn changed(&self) -> Error {
        WeightsError::Changed { path: self.path.clone(), size: self.size }.into()
    }

    fn unfit(&self, problem: String) -> Error {
        unfit(&self.path, problem)
    }
}

fn unfit(path: &Path, problem: String) -> Error {
    WeightsError::Invalid { path: path.to_owned(), problem }.into()
}

fn unopened(path: &Path, named_by: Option<&Path>, error: io::Error) -> Error {
    let path = path.to_owned();
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            WeightsError::Absent { path, named_by: named_by.map(Path::to_owned) }.into()
        }
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidFilename => unfit(&path, "is not a valid path".to_owned()),
        io::ErrorKind::PermissionDenied => WeightsError::Denied { path }.into(),
        _ => Error::system(format!("open {}", path.display()), error),
    }
}
