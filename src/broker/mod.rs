//! GPU memory under names: a server that keeps the memory and needs no GPU, and its client.
//!
//! A process [puts](Client::put) its memory under a name, and may then exit. Other processes [get](Client::get) the memory by name, map it
//! read-only and hold a [`Lease`] as long as they use it. A new version replaces the old version at once; readers keep the version they
//! hold. The [`Server`] holds descriptors and their description. It never loads the CUDA driver.
//!
//! ```
//! use std::{thread, time::Duration};
//! use vmmfd::{
//!     broker::{Client, Get, Put, PutPart, Server, ServerConfig},
//!     channel::{Cancel, CancelReason},
//!     driver::{Backend, Choice, open},
//!     memory::{Device, Region, Selector, Shared, Spec},
//!     session::Config,
//! };
//!
//! # fn main() -> vmmfd::Result<()> {
//! # let folder = std::env::temp_dir().join(format!("vmmfd-doc-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder).unwrap();
//! let path = folder.join("broker.sock");
//! let cancel = Cancel::new()?;
//! let server = Server::bind(&path, ServerConfig::default(), &cancel)?;
//! let serving = thread::spawn(move || server.run());
//!
//! let driver = open(Choice::Only(Backend::Host))?.driver;
//! let device = Device::find(&driver, Selector::default())?;
//! let memory = Shared::create(&device, Spec::vmm(1 << 20))?;
//! memory.copy_in(0, b"weights")?;
//! let maker = Client::connect(&path, &Config::default())?;
//! maker.put(&Put::new("models/tiny").part(PutPart::of("all", &memory)?))?;
//! // The broker holds the memory now, so its creator may exit.
//! drop((memory, maker));
//!
//! let reader = Client::connect(&path, &Config::default())?;
//! let object = reader.get(&Get::new("models/tiny"))?.open(&driver, None)?;
//! let mut bytes = [0; 7];
//! object.part("all").expect("the part that was put").memory()?.copy_out(0, &mut bytes)?;
//! assert_eq!(&bytes, b"weights");
//! # drop((object, reader));
//! # cancel.cancel(CancelReason::Program);
//! # serving.join().unwrap().ok();
//! # std::fs::remove_dir_all(&folder).unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! [`crate::wire::broker`] defines the messages.

mod client;
pub(crate) mod keeper;
mod manifest;
pub(crate) mod notify;
mod request;
pub(crate) mod server;

pub use self::client::{
    Claim, ClaimOf, Client, Condition, Found, Get, Holders, Lease, LeasedPart, LossReason, Lost, Object, ObjectInfo,
    ObjectPart, Prepared, Put, PutPart, Recall, RecallHolder, RecallOf, Restored, Watch, WatchPlace, Watched,
};
use crate::sys::table;

pub(crate) use self::client::{Meeting, Meetings};
pub use self::keeper::KeeperPath;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub use self::server::MIN_FILE_LIMIT;
pub(crate) use self::server::inspect_and_classify;
pub use self::server::{Server, ServerConfig, ServerReport};
pub use crate::wire::broker::{
    ArrayEntry, Attached, DeviceBytes, Durations, Event, EventKind, HeldClaim, HeldLease, HeldTopic, KeeperInfo,
    Lifetime, Maker, Measured as Metrics, Owner, PartInfo, Published, Quota, ReportInfo, RequestCount, Room, StoreRoom,
    Summary, UserTotal, VersionInfo,
};
