//! Requests and answers in another device's terms.

use block::{Bytes, Data, Extent, ExtentState, ExtentStatus, Mutation, MutationKind};

/// `mutation` at another place. Its checksums are of its own place and stay behind.
pub(crate) fn moved(mutation: &Mutation, offset: Bytes) -> Mutation {
    let extent = Extent::new(offset, mutation.extent().length);
    let moved = match mutation.kind() {
        MutationKind::Data(data) => Mutation::data(offset, Data::clone(data)),
        MutationKind::Zeroes { may_unmap } => Mutation::zeroes(extent, *may_unmap),
        MutationKind::Discard => Mutation::discard(extent),
    };
    moved.with_fua(mutation.fua)
}

/// The pieces of a device that counts in smaller units than the one above it. Each begins and ends with a unit, and
/// what is zero only in part is data. The first begins with a unit; `size` is that of the device above.
pub(crate) fn in_units(pieces: Vec<ExtentStatus>, unit: u64, size: Bytes) -> Vec<ExtentStatus> {
    let mut aligned: Vec<ExtentStatus> = Vec::new();
    let mut push = |extent: Extent, state: ExtentState| match aligned.last_mut() {
        _ if extent.is_empty() => {}
        Some(last) if last.state == state => last.extent.length += extent.length,
        _ => aligned.push(ExtentStatus { extent, state }),
    };
    let mut next = pieces[0].extent.offset;
    let end = pieces.last().map_or(next, |last| last.extent.end());
    for piece in pieces.into_iter().filter(|piece| piece.state.reads_zero()) {
        let end = if piece.extent.end() == size { size } else { piece.extent.end().align_down(unit) };
        let start = piece.extent.offset.align_up(unit).max(next);
        if start < end {
            push(Extent::between(next, start), ExtentState::Data);
            push(Extent::between(start, end), piece.state);
            next = end;
        }
    }
    push(Extent::between(next, end.align_up(unit).min(size).max(next)), ExtentState::Data);
    aligned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_finer_device_are_told_in_whole_units() {
        let piece = |start, end, state| ExtentStatus { extent: Extent::between(Bytes(start), Bytes(end)), state };
        let told = |pieces: Vec<ExtentStatus>| -> Vec<(u64, u64, bool)> {
            let told = in_units(pieces, 4096, Bytes(20_000));
            told.iter().map(|piece| (piece.extent.offset.0, piece.extent.end().0, piece.state.reads_zero())).collect()
        };
        let (hole, data) = (ExtentState::Hole, ExtentState::Data);
        assert_eq!(told(vec![piece(0, 512, hole)]), [(0, 4096, false)]);
        assert_eq!(
            told(vec![piece(0, 4608, hole), piece(4608, 5120, data), piece(5120, 20_000, hole)]),
            [(0, 4096, true), (4096, 8192, false), (8192, 20_000, true)]
        );
        assert_eq!(told(vec![piece(4096, 9000, data)]), [(4096, 12_288, false)]);
        assert_eq!(told(vec![piece(0, 8192, data), piece(8192, 9000, hole)]), [(0, 12_288, false)]);
    }
}
