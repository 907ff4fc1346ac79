//! The filters against the device contract, and the formats that they store. One program: what it links is linked once.

mod conformance;
mod overlay_format;
