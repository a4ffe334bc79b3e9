//! The parts of `vmmfd exporter`: an HTTP server, scrapes of the broker, and the text formats of Prometheus.

pub(super) mod http;
pub(super) mod scraper;
pub(super) mod text;
