//! The parts of `vmmfd exporter`: a small HTTP server, scrapes of the broker, and their text for Prometheus.

pub(super) mod http;
pub(super) mod scraper;
pub(super) mod text;
