//! Safetensors files, read by several threads into memory of this process.

use std::{collections::HashMap, ffi::OsString, num::NonZero, path::PathBuf, sync::Arc};

use pyo3::{
    exceptions::{PyKeyError, PyTypeError},
    prelude::*,
};
use vmmfd::{
    Error,
    channel::CancelReason,
    fork::ProcessIdentity,
    memory::Rdma,
    weights::{Checkpoint, LoadOptions, Loaded, Tensor},
};

use crate::{
    array::Array,
    client_put::Entry,
    device::Wanted,
    driver,
    error::{Failure, Outcome, shown},
    memory::{Owned, RdmaOption},
    shared::PyMemory,
    signals,
    text::{FilePath, Text},
};

/// Weights in memory: arrays by name.
#[pyclass(name = "Weights", module = "vmmfd._native", frozen, weakref)]
pub(crate) struct Weights {
    memory: Arc<Owned>,
    tensors: Vec<Tensor>,
    index: HashMap<String, usize>,
    metadata: String,
    files: Vec<OsString>,
    digest: Option<String>,
    made_by: ProcessIdentity,
}

#[pymethods]
impl Weights {
    fn names(&self) -> Vec<&str> {
        self.tensors.iter().map(|tensor| tensor.name.as_str()).collect()
    }

    fn __len__(&self) -> usize {
        self.tensors.len()
    }

    fn __contains__(&self, name: &Bound<'_, PyAny>) -> bool {
        name.extract::<String>().is_ok_and(|name| self.index.contains_key(&name))
    }

    fn __getitem__(&self, name: &Bound<'_, PyAny>) -> Outcome<Array> {
        self.made_by.check()?;
        let found = name.extract::<String>().ok().and_then(|name| self.index.get(&name));
        let &found = found.ok_or_else(|| PyKeyError::new_err(name.clone().unbind()))?;
        Array::new(Arc::clone(&self.memory) as _, self.tensors[found].array.clone())
    }

    #[getter]
    fn memory(&self) -> PyMemory {
        PyMemory::shared(Arc::clone(&self.memory))
    }

    /// The files' own metadata, as a JSON object.
    #[getter]
    fn metadata(&self) -> &str {
        &self.metadata
    }

    #[getter]
    fn files(&self) -> &[OsString] {
        &self.files
    }

    #[getter]
    fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// Returns the arrays for a put.
    fn entries(&self) -> Vec<Entry> {
        let entry = |tensor: &Tensor| {
            let array = &tensor.array;
            (tensor.name.clone(), array.dtype.to_string(), array.shape.clone(), None, 0, array.offset, None)
        };
        self.tensors.iter().map(entry).collect()
    }
}

/// Reads files, folders or indexes.
///
/// Runs without the GIL, except that about 25 times per second it calls `progress(done, all)` and, in the main thread, signal handlers. An
/// exception from either stops the work.
#[pyfunction]
#[pyo3(signature = (paths, *, backend=None, device=None, digest=false, progress=None, threads=None, rdma=RdmaOption(Rdma::Auto)))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn load_safetensors(
    py: Python<'_>,
    paths: Vec<FilePath>,
    backend: Option<Text>,
    device: Option<Wanted>,
    digest: bool,
    progress: Option<Bound<'_, PyAny>>,
    threads: Option<u64>,
    rdma: RdmaOption,
) -> Outcome<Weights> {
    let options = match threads {
        None => LoadOptions::new(),
        Some(threads) => match usize::try_from(threads).ok().and_then(NonZero::new) {
            Some(threads) if threads.get() <= MAX_THREADS => LoadOptions::new().threads(threads),
            _ => return Err(Failure::invalid(format!("threads={threads} is not from 1 to {MAX_THREADS}"))),
        },
    };
    let options = options.rdma(rdma.0);
    let options = if digest { options.digest() } else { options };
    if let Some(progress) = progress.as_ref().filter(|progress| !progress.is_callable()) {
        return Err(PyTypeError::new_err(format!("progress={} can't be called", shown(progress)?)).into());
    }
    let progress = progress.map(Bound::unbind);
    let paths: Vec<PathBuf> = paths.into_iter().map(|FilePath(path)| path).collect();
    driver::backend(backend.as_deref())?;
    signals::run(py, &[], move || {
        let checkpoint = Checkpoint::open(&paths)?;
        let device = driver::open_device(backend.as_deref(), device)?;
        let mut raised = None;
        let mut tick = |done: u64| {
            // None during interpreter shutdown: nothing needs the weights.
            let called = Python::try_attach(|py| -> PyResult<()> {
                py.check_signals()?;
                progress.iter().try_for_each(|call| call.call1(py, (done, checkpoint.size())).map(drop))
            });
            match called {
                Some(Ok(())) => Ok(()),
                ended => {
                    raised = ended.and_then(Result::err);
                    Err(Error::Interrupted { reason: CancelReason::Program })
                }
            }
        };
        let loaded = checkpoint.load(&device, &options, &mut tick);
        if let Some(error) = raised {
            return Err(Failure::Python(error));
        }
        let Loaded { memory, digest, .. } = loaded?;
        let tensors = checkpoint.tensors().to_vec();
        Ok(Weights {
            memory: Owned::new(Arc::new(memory)),
            index: tensors.iter().enumerate().map(|(index, tensor)| (tensor.name.clone(), index)).collect(),
            tensors,
            metadata: serde_json::Value::Object(checkpoint.metadata().clone()).to_string(),
            files: checkpoint.files().map(Into::into).collect(),
            digest,
            made_by: ProcessIdentity::current(),
        })
    })
}

/// More threads would only wait.
const MAX_THREADS: usize = 256;
