//! Doubly linked lists of places in one table of eight bytes a place. A place is in one list at most.

use super::set_length;

/// No place.
pub(super) const NONE: u32 = u32::MAX;

/// The neighbours of each place in its list: the one before and the one behind.
#[derive(Default)]
pub(super) struct Links(Vec<[u32; 2]>);

impl Links {
    pub(super) const fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn resize(&mut self, places: usize) {
        set_length(&mut self.0, places, [NONE; 2]);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.0.capacity() * size_of::<[u32; 2]>()
    }

    /// The place behind each one; `u32::MAX` behind the last of a list.
    pub(super) fn behind(&self) -> Vec<u32> {
        self.0.iter().map(|[_, behind]| *behind).collect()
    }
}

/// A list of places.
pub(super) struct List {
    first: u32,
    last: u32,
    length: usize,
}

impl Default for List {
    fn default() -> Self {
        Self { first: NONE, last: NONE, length: 0 }
    }
}

impl List {
    pub(super) const fn len(&self) -> usize {
        self.length
    }

    /// The first one; `u32::MAX` if there is none.
    pub(super) const fn first(&self) -> u32 {
        self.first
    }

    pub(super) fn last(&self) -> Option<u32> {
        (self.last != NONE).then_some(self.last)
    }

    pub(super) fn push_front(&mut self, links: &mut Links, place: u32) {
        links.0[place as usize] = [NONE, self.first];
        match self.first {
            NONE => self.last = place,
            first => links.0[first as usize][0] = place,
        }
        self.first = place;
        self.length += 1;
    }

    pub(super) fn push_back(&mut self, links: &mut Links, place: u32) {
        links.0[place as usize] = [self.last, NONE];
        match self.last {
            NONE => self.first = place,
            last => links.0[last as usize][1] = place,
        }
        self.last = place;
        self.length += 1;
    }

    pub(super) fn remove(&mut self, links: &mut Links, place: u32) {
        let [before, behind] = std::mem::replace(&mut links.0[place as usize], [NONE; 2]);
        match before {
            NONE => self.first = behind,
            before => links.0[before as usize][1] = behind,
        }
        match behind {
            NONE => self.last = before,
            behind => links.0[behind as usize][0] = before,
        }
        self.length -= 1;
    }

    pub(super) fn move_to_front(&mut self, links: &mut Links, place: u32) {
        if self.first != place {
            self.remove(links, place);
            self.push_front(links, place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::order::Order;
    use super::*;

    #[test]
    fn a_list_is_what_a_vector_would_be() {
        let mut links = Links::default();
        links.resize(5);
        let mut list = List::default();
        let mut plain: Vec<u32> = Vec::new();
        let mut random = block::testing::Random::new(3);
        for _ in 0..2000 {
            let place = random.below(5) as u32;
            if let Some(at) = plain.iter().position(|found| *found == place) {
                plain.remove(at);
                if random.one_in(2) {
                    list.move_to_front(&mut links, place);
                    plain.insert(0, place);
                } else {
                    list.remove(&mut links, place);
                }
            } else {
                if random.one_in(3) {
                    list.push_back(&mut links, place);
                    plain.push(place);
                } else {
                    list.push_front(&mut links, place);
                    plain.insert(0, place);
                }
            }
            let order = Order::Lists { firsts: vec![list.first()], behind: links.behind(), uses: Vec::new() };
            assert_eq!(order.hottest(usize::MAX), plain);
            assert_eq!((list.last(), list.len()), (plain.last().copied(), plain.len()));
        }
    }
}
