//! Topics: the messages by which a broker introduces publishers and subscribers of streams.

use crate::{base::strict::objects, wire::strict::or_default};

objects! {
    /// Opens a topic until the connection closes: the broker introduces its followers.
    pub struct OpenTopic {
        /// The topic's name, with the form of an object's name.
        pub name: String,
        /// Identifies the publisher's run.
        pub epoch: u64,
        /// Who may follow it: the bits for reading, as for an object. By default only the publisher's user.
        pub mode: Option<u16>,
    }

    /// Follows topics until the connection closes: the broker introduces their publishers, now and later.
    pub struct Follow {
        /// The topic's name.
        pub name: String,
        /// Whether all topics whose names start with `name` are followed.
        #[serde(default, deserialize_with = "or_default", skip_serializing_if = "std::ops::Not::not")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<bool>"))]
        pub prefix: bool,
    }

    /// Confirms `topic` and `follow`.
    pub struct Opened {}

    /// Introduces the other side of a stream. Carries a connected socket, whose other end the other side receives, and, with `process`, a
    /// pidfd of the other side's process.
    pub struct Meet {
        /// The topic's name.
        pub name: String,
        /// The publisher's run.
        pub epoch: u64,
        /// The other side's process in the server's PID namespace, or 0.
        pub pid: i32,
        /// The other side's user.
        pub uid: u32,
        /// The other side's group.
        pub gid: u32,
        /// Whether a pidfd follows.
        #[serde(default, deserialize_with = "or_default", skip_serializing_if = "std::ops::Not::not")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<bool>"))]
        pub process: bool,
    }

    /// Confirms an introduction, so that the next may follow.
    pub struct Met {}

    /// A topic with a publisher.
    pub struct HeldTopic {
        /// The topic's name.
        pub name: String,
        /// The publisher's run.
        pub epoch: u64,
        /// The publisher's process in the server's PID namespace, or 0.
        pub pid: i32,
        /// The publisher's user.
        pub uid: u32,
        /// The publisher's command, if the server can read it.
        pub command: Option<String>,
        /// The number of followers that were introduced to the publisher and have not left.
        pub followers: u64,
    }
}
