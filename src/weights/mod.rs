//! Model weights: loads the tensors of safetensors files into shared memory.
//!
//! [`Checkpoint::open`] reads the headers, compares them with the files and rejects inconsistent files before it allocates memory.
//! [`Checkpoint::load`] then creates one [`Shared`](crate::memory::Shared) and fills it. Several threads read, each into its own
//! page-locked buffer, so that one thread reads while another copies to the device.
//!
//! ```
//! use vmmfd::{
//!     driver::{Backend, Choice, open},
//!     memory::{Device, Region, Selector},
//!     weights::{Checkpoint, LoadOptions},
//! };
//!
//! # fn main() -> vmmfd::Result<()> {
//! # let path = std::env::temp_dir().join(format!("vmmfd-doc-{}.safetensors", std::process::id()));
//! # let header = r#"{"bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
//! # let mut file = (header.len() as u64).to_le_bytes().to_vec();
//! # file.extend(header.bytes());
//! # file.extend([1.0_f32, 2.0].iter().flat_map(|number| number.to_le_bytes()));
//! # std::fs::write(&path, file).unwrap();
//! let driver = open(Choice::Only(Backend::Host))?.driver;
//! let device = Device::find(&driver, Selector::default())?;
//! // Takes files, folders and indexes.
//! let checkpoint = Checkpoint::open([&path])?;
//! let loaded = checkpoint.load(&device, &LoadOptions::new(), &mut |_| Ok(()))?;
//! let bias = &checkpoint.tensors()[0];
//! let mut bytes = [0; 8];
//! loaded.memory.copy_out(bias.array.offset, &mut bytes)?;
//! assert_eq!((bias.name.as_str(), &bytes[4..]), ("bias", &2.0_f32.to_le_bytes()[..]));
//! # std::fs::remove_file(&path).unwrap();
//! # Ok(())
//! # }
//! ```

mod checkpoint;
mod digest;
mod header;
mod layout;
mod load;

pub use self::{
    checkpoint::{ALIGNMENT, Checkpoint, Tensor},
    digest::digest_of_memory,
    load::{LoadOptions, Loaded, SEGMENT_SIZE},
};
