//! What `vmmfd exporter` is made of: a small HTTP server, and the broker's figures as text for Prometheus.

pub(super) mod http;
pub(super) mod text;
