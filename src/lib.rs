//! Hands GPU memory from one process to another: CUDA virtual memory management over `SCM_RIGHTS`.
#[cfg(not(target_os = "linux"))]
compile_error!("vmmfd needs Linux: it passes memory as file descriptors over Unix sockets of type SOCK_SEQPACKET.");

pub mod driver;
pub mod error;
pub mod memory;
pub mod pattern;
pub mod wire;
pub use error::{Error, Result};
pub mod channel {
    pub struct Cancel;
    impl Cancel {
        pub(crate) fn name(_: i32) -> &'static str {
            "x"
        }
    }
}
