//! A table for people.

use std::fmt;

/// Words above, columns, and rows.
pub struct Table {
    notes: Vec<String>,
    columns: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table of `columns`.
    #[must_use]
    pub fn new(columns: &[&'static str]) -> Self {
        Self { notes: Vec::new(), columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds a line above the table.
    pub fn note(&mut self, line: impl Into<String>) {
        self.notes.push(line.into());
    }

    /// Adds a row.
    ///
    /// # Panics
    /// If it has not one cell a column.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.columns.len(), "a cell for every column");
        self.rows.push(cells);
    }

    /// The cells of its rows.
    #[must_use]
    pub fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }
}

impl fmt::Display for Table {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for note in &self.notes {
            writeln!(out, "{note}")?;
        }
        let widths = self.columns.iter().enumerate().map(|(column, name)| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0).max(name.chars().count())
        });
        let widths: Vec<usize> = widths.collect();
        let mut line = |cells: &mut dyn Iterator<Item = &str>| {
            let padded = cells.zip(&widths).enumerate().map(|(column, (cell, width))| match column {
                0 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            });
            let padded: Vec<String> = padded.collect();
            writeln!(out, "{}", padded.join("  ").trim_end())
        };
        line(&mut self.columns.iter().copied())?;
        self.rows.iter().try_for_each(|row| line(&mut row.iter().map(String::as_str)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["what", "n"]);
        table.note("above");
        table.row(vec!["a longer one".into(), "12345".into()]);
        assert_eq!(table.to_string(), "above\nwhat              n\na longer one  12345\n");
    }
}
