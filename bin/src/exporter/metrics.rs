//! The broker's metrics in the text format of Prometheus.

use std::{collections::BTreeMap, fmt};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, NoLabelSet, prometheus_text::encode},
    metrics::MetricType::{self, Counter, Gauge, Histogram},
    registry::Registry,
};
use vmmfd::{
    broker::{Metrics, Quota, UserTotal},
    internals::prefixed_uuid,
};

pub(crate) use prometheus_client::encoding::prometheus_text::CONTENT_TYPE;

const NO_LABELS: [(&str, &str); 0] = [];

/// The metrics of a broker, or of a broker that does not answer.
pub(crate) fn render(metrics: Option<Metrics>) -> String {
    let mut registry = Registry::default();
    let mut text = String::new();
    registry.register_collector(Box::new(Scrape(metrics)));
    // Writing to a string can't fail.
    let _ = encode(&mut text, &registry);
    text
}

#[derive(Debug)]
struct Scrape(Option<Metrics>);

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut text = Text(encoder);
        text.numbers(&[("vmmfd_up", "Whether the broker answers", Some(self.0.is_some().into()))])?;
        let Some(metrics) = &self.0 else { return Ok(()) };
        let open = metrics.descriptors;
        let store = &metrics.store;
        text.numbers(&[
            ("vmmfd_objects", "Names that the broker has", Some(metrics.objects)),
            ("vmmfd_versions", "Versions that the broker keeps, also without a name", Some(metrics.versions)),
            ("vmmfd_leases", "Leases that are held", Some(metrics.leases)),
            ("vmmfd_connections", "Connections to the broker, the exporter's own included", Some(metrics.connections)),
            ("vmmfd_watchers", "Connections that wait for events", Some(metrics.watchers)),
            ("vmmfd_open_descriptors", "Open descriptors of the broker", Some(open.used)),
            ("vmmfd_max_descriptors", "The most descriptors that the broker may have open", Some(open.allowed)),
            ("vmmfd_stored_descriptors", "Descriptors that the keeper holds", Some(store.used)),
            ("vmmfd_max_stored_descriptors", "The most descriptors that the keeper may hold", Some(store.allowed)),
        ])?;
        let infos = [
            ("vmmfd_build_info", "The version of the broker's program", "version", metrics.version.as_deref()),
            ("vmmfd_store_info", "Which process holds the broker's descriptors", "kind", Some(&*store.kind)),
        ];
        for (name, help, label, value) in infos {
            text.family(Gauge, name, help, value.map(|value| ([(label, value)], 1)))?;
        }
        let help = "When the broker's process started, since 1970";
        let mut start = text.0.encode_descriptor("vmmfd_start_time_seconds", help, None, Gauge)?;
        start.encode_gauge(&(metrics.started_ms as f64 / 1e3))?;
        text.users(metrics)?;
        text.limits("vmmfd_quota", "each user", metrics.quota.unwrap_or_default())?;
        text.limits("vmmfd_total_quota", "all users together", metrics.total_quota.unwrap_or_default())?;
        text.requests(metrics)
    }
}

struct Text<'a>(DescriptorEncoder<'a>);

impl Text<'_> {
    /// A gauge or a counter with a sample for each set of labels.
    fn family<L: EncodeLabelSet>(
        &mut self,
        kind: MetricType,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (L, u64)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, kind)?;
        samples.into_iter().try_for_each(|(labels, value)| match kind {
            Counter => metric.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None),
            _ => metric.encode_family(&labels)?.encode_gauge(&value),
        })
    }

    /// A gauge without labels for each value that exists.
    fn numbers(&mut self, gauges: &[(&str, &str, Option<u64>)]) -> fmt::Result {
        let known = gauges.iter().filter_map(|(name, help, value)| Some((name, help, (*value)?)));
        known.into_iter().try_for_each(|(name, help, value)| self.family(Gauge, name, help, [(NO_LABELS, value)]))
    }

    fn users(&mut self, metrics: &Metrics) -> fmt::Result {
        let totals = &metrics.totals;
        let claimed = totals.iter().flat_map(|total| total.devices.iter().map(move |of| (total.uid, of)));
        let claimed =
            claimed.map(|(uid, of)| ([("device", prefixed_uuid(&of.device)), ("uid", uid.to_string())], of.bytes));
        self.family(Gauge, "vmmfd_claimed_bytes", "Memory as its makers claim it, by device and user", claimed)?;
        for (name, help, count) in [
            ("vmmfd_user_objects", "Names that are a user's", (|of| of.objects) as fn(&UserTotal) -> u64),
            ("vmmfd_user_leases", "Leases that a user's processes hold", |of| of.leases),
            ("vmmfd_user_connections", "Connections of a user's processes", |of| of.connections),
        ] {
            self.family(Gauge, name, help, totals.iter().map(|of| ([("uid", of.uid)], count(of))))?;
        }
        let mut claims = BTreeMap::new();
        for claim in metrics.claims.iter().flatten() {
            *claims.entry(claim.uid).or_default() += 1;
        }
        let claims = claims.into_iter().map(|(uid, count)| ([("uid", uid)], count));
        self.family(Gauge, "vmmfd_user_claims", "Claims that a user's processes hold", claims)
    }

    /// The limits that are set.
    fn limits(&mut self, prefix: &str, whose: &str, limits: Quota) -> fmt::Result {
        for (key, what, limit) in [
            ("bytes", "Memory and tables, as claimed", limits.bytes),
            ("device_bytes", "Memory of a device, as claimed", limits.device_bytes),
            ("objects", "Names and earlier versions", limits.objects),
            ("leases", "Leases", limits.leases),
            ("connections", "Connections", limits.connections),
        ] {
            self.numbers(&[(&format!("{prefix}_{key}"), &format!("{what}, that {whose} may have"), limit)])?;
        }
        Ok(())
    }

    fn requests(&mut self, metrics: &Metrics) -> fmt::Result {
        let restarts = [(NO_LABELS, metrics.restarts)];
        self.family(Counter, "vmmfd_restarts", "Starts of a server with what another one had held", restarts)?;
        let requests = metrics.requests.iter().map(|of| ([("verb", &*of.verb), ("outcome", &*of.outcome)], of.count));
        self.family(Counter, "vmmfd_requests", "Requests that this server has answered", requests)?;
        let help = "How long the broker took to answer, requested waits included";
        let mut seconds = self.0.encode_descriptor("vmmfd_request_seconds", help, None, Histogram)?;
        for of in &metrics.durations {
            let bounds = of.bounds_us.iter().map(|us| *us as f64 / 1e6);
            let buckets: Vec<(f64, u64)> = bounds.zip(of.counts.iter().copied()).collect();
            let sum = of.sum_us as f64 / 1e6;
            let count = of.counts.iter().sum();
            let labels = [("verb", &*of.verb)];
            seconds.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
        Ok(())
    }
}
