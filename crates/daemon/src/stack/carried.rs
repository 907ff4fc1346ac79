//! The layers of a volume that goes to another host, as the hosts tell each other.

use block::{Bytes, Device};
use migrate::stream::protocol::{SessionLayer, SessionLayerKind, SessionLayers};

use crate::document::{LayerDocument, LayerKind, LayerState, OverlayLayer, ThrottleLayer};

/// What another host is told of `layers`, whose backend and files are `parts`. Nothing if there are none.
pub(crate) fn carried(layers: &[LayerDocument], parts: &[Device]) -> Option<SessionLayers> {
    if layers.iter().all(LayerDocument::is_of_host) {
        return None;
    }
    let mut sizes = parts.iter().map(Device::size);
    let base_bytes = sizes.next().unwrap_or(Bytes::ZERO).get();
    let layers = layers.iter().filter_map(|layer| {
        let kind = match &layer.kind {
            LayerKind::Overlay(overlay) => SessionLayerKind::Overlay {
                name: overlay.name.clone(),
                created_unix_ms: overlay.created_unix_ms,
                bytes: sizes.next().unwrap_or(Bytes::ZERO).get(),
            },
            LayerKind::Throttle(ThrottleLayer { iops, bytes_per_second }) => {
                SessionLayerKind::Throttle { iops: *iops, bytes_per_second: *bytes_per_second }
            }
            // They stay at the source.
            LayerKind::Redirect(_) | LayerKind::Cache(_) => return None,
        };
        Some(SessionLayer { id: layer.id, kind })
    });
    Some(SessionLayers { base_bytes, layers: layers.collect() })
}

/// The layers that another host has told of, beside an image whose first overlay gets the number `first`.
pub(crate) fn layers_of(carried: &SessionLayers, first: u32) -> Vec<LayerDocument> {
    let mut numbers = first..;
    let layers = carried.layers.iter().map(|layer| {
        let (kind, state) = match &layer.kind {
            SessionLayerKind::Overlay { name, created_unix_ms, bytes: _ } => {
                let number = numbers.next().expect("the numbers are without end");
                let (name, created_unix_ms) = (name.clone(), *created_unix_ms);
                let overlay = OverlayLayer { name, number, directory: None, created_unix_ms, file: None };
                (LayerKind::Overlay(overlay), LayerState::MayHold)
            }
            SessionLayerKind::Throttle { iops, bytes_per_second } => {
                let throttle = ThrottleLayer { iops: *iops, bytes_per_second: *bytes_per_second };
                (LayerKind::Throttle(throttle), LayerState::Clean)
            }
        };
        LayerDocument { id: layer.id, kind, state }
    });
    layers.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::MemDevice;
    use uuid::Uuid;

    #[test]
    fn layers_that_are_told_of_are_the_same_elsewhere_but_for_their_files() {
        let overlay = |name: &str, number, directory| {
            let overlay = OverlayLayer { name: name.to_owned(), number, directory, created_unix_ms: 7, file: None };
            LayerDocument {
                id: Uuid::from_u128(number.into()),
                kind: LayerKind::Overlay(overlay),
                state: LayerState::MayHold,
            }
        };
        let throttle = LayerKind::Throttle(ThrottleLayer { iops: Some(500), bytes_per_second: None });
        let throttle = LayerDocument { id: Uuid::nil(), kind: throttle, state: LayerState::Clean };
        let layers = [overlay("a", 4, Some("/fast".into())), throttle.clone(), overlay("b", 9, None)];
        let parts = [10, 11, 12].map(|mib| Device::new("part", MemDevice::new(Bytes::mib(mib))));
        let told = carried(&layers, &parts).expect("it has layers");
        assert_eq!(told.part_sizes(), [10, 11, 12].map(Bytes::mib));
        let there = layers_of(&told, 1);
        assert_eq!(there[1], throttle);
        for (here, there, number) in [(&layers[0], &there[0], 1), (&layers[2], &there[2], 2)] {
            assert_eq!(here.id, there.id);
            let [here, there] = [here, there].map(|layer| layer.overlay().expect("an overlay"));
            assert_eq!((&here.name, number, None), (&there.name, there.number, there.directory.as_ref()));
        }
        assert_eq!(carried(&[], &parts), None);
    }
}
