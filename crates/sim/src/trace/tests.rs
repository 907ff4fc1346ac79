//! That every format is read as its specification has it. The snippets are ours, in the formats of the archives.

use super::*;

fn read_text(format: Format, text: &str) -> Vec<Record> {
    read(format, text.as_bytes()).expect("the snippet is well formed")
}

#[test]
fn spc_lines_are_blocks_of_512_bytes_and_fractions_of_seconds() {
    let records = read_text(Format::Spc, "0,100,8192,R,0.026214\n3,7,512,w,1.5,extra,fields\n");
    assert_eq!(records[0].request, Request::read(51_200, 8192));
    assert_eq!(records[0].at, Duration::from_micros(26_214));
    assert_eq!((records[1].request, records[1].volume), (Request::write(3584, 512), 3));
}

#[test]
fn msr_lines_are_windows_file_times_in_hundreds_of_nanoseconds() {
    let text = "128166372003061629,hm,1,Read,383496192,32768,113736\n128166372013061629,hm,0,Write,0,4096,5\n";
    let records = read_text(Format::Msr, text);
    assert_eq!(records[1].at - records[0].at, Duration::from_secs(1));
    assert_eq!((records[0].request, records[0].volume), (Request::read(383_496_192, 32_768), 1));
    assert_eq!(records[1].request, Request::write(0, 4096));
}

#[test]
fn blkparse_gives_what_was_queued_and_nothing_twice() {
    let text = "  8,0    3        1     0.000000000   697  Q   WS 223490 + 8 [kjournald]
  8,0    3        2     0.000001829   697  G   WS 223490 + 8 [kjournald]
  8,0    3        3     0.000100000   697  D   WS 223490 + 8 [kjournald]
  8,16   1        4     0.250000000   700  Q   RA 64 + 16 [cat]
  8,0    1        5     0.300000000   700  Q   FWS [fsync]
  8,0    1        6     0.400000000   700  Q   DS 64 + 16 [fstrim]
CPU0 (8,0):
 Reads Queued:           1,        8KiB	 Writes Queued:           1,        4KiB
";
    let records = read_text(Format::Blkparse, text);
    let requests: Vec<Request> = records.iter().map(|record| record.request).collect();
    assert_eq!(requests, [Request::write(223_490 * 512, 4096), Request::read(32_768, 8192), Request::flush()]);
    assert_eq!((records[1].at, records[1].volume), (Duration::from_millis(250), 16));
}

#[test]
fn plain_lines_come_in_the_order_of_their_times() {
    let records = read_text(Format::Plain, "time_us,op,offset_bytes,length_bytes\n20,W,512,1024\n10,R,0,4096\n");
    assert_eq!(records[0].request, Request::read(0, 4096));
    assert_eq!(records[1].at, Duration::from_micros(20));
}

#[test]
fn a_line_that_is_no_request_is_named_and_not_guessed() {
    for (format, text) in [
        (Format::Spc, "0,100,8192,R,0.1\n0,100,8192,X,0.2"),
        (Format::Msr, "1,hm,0,Read,0,1,1\n1,hm,0,Trim,0,1,1"),
        (Format::Blkparse, "8,0 0 1 0.0 1 Q R 1 + 8 [a]\n8,0 0 1 0.0 1 Q R x + 8 [a]"),
        (Format::Plain, "1,R,0,512\n1,R,0"),
    ] {
        let error = read(format, text.as_bytes()).expect_err("a line that is no request passed");
        assert!(error.to_string().contains("line 2"), "{format:?}: {error}");
    }
}
