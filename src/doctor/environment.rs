//! Where the probes run: what of a machine decides whether memory can be shared.

use serde::{Deserialize, Serialize};

/// What was seen of one end.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Environment {
    /// The kernel: name, release and machine, as uname(2) has them.
    pub kernel: String,
}
