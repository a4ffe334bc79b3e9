//! GPU memory under names: a server that keeps it and needs no GPU, and its client.

mod catalogue;
mod server;
