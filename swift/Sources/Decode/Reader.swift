import Foundation

/// A text as an encoder's tokenizer reads it.
package struct ReadText: Sendable {
    /// The tokens, with those before and after every text.
    package let ids: [Int]
    /// Where each token lies, in Unicode scalars.
    package let offsets: [Range<Int>]
    /// The tokens that are of the text.
    package let inside: Range<Int>

    /// Describe a text.
    package init(ids: [Int], offsets: [Range<Int>], inside: Range<Int>) {
        self.ids = ids
        self.offsets = offsets
        self.inside = inside
    }
}

/// The result of labelling a text.
public struct Labelled: Equatable, Sendable {
    /// The spans in the order of the text.
    public let spans: [Span]
    /// The tokens, with the special ones around the text.
    public let tokens: Int
    /// The passes that the text took part in.
    public let windows: Int
    /// True if the result equals the result of a single pass over the whole text.
    public let isExact: Bool
}

/// An encoder that labels, classifies and embeds texts that are given as tokens.
package final class Reader {
    /// The encoder.
    package let encoder: Encoder
    private let transitions: Transitions?

    /// Make a reader.
    ///
    /// - Throws: `ShardmillError` if the checkpoint's calibration can't be read.
    package init(_ encoder: Encoder) throws {
        self.encoder = encoder
        transitions = try encoder.manifest.calibration.map { try Transitions($0, labels: encoder.manifest.labels) }
    }

    private func demand(_ task: EncoderManifest.Task) throws {
        let (model, own) = (encoder.manifest.model, encoder.manifest.task)
        if own != task { throw ShardmillError(.request, "\(model) is for \(own.rawValue), not for \(task.rawValue)") }
    }

    /// Return the spans of texts.
    ///
    /// With the checkpoint's calibration, the spans follow the best path through BIOES. Without one, they are the spans
    /// that transformers' pipeline builds from each token's likeliest label.
    package func label(_ texts: [ReadText], beforePass: () throws -> Void = {}) throws -> [Labelled] {
        try demand(.tokens)
        let windows = try texts.map { text in
            if text.inside.isEmpty { return Windows() }
            return try Windows(
                Array(text.ids[text.inside]), before: Array(text.ids[..<text.inside.lowerBound]),
                after: Array(text.ids[text.inside.upperBound...]), longest: encoder.manifest.longest,
                reach: encoder.manifest.reach)
        }
        var rows = try encoder.run(windows.flatMap(\.tokens), beforePass: beforePass)[...]
        return zip(texts, windows).map { text, windows in
            let own = Array(rows.prefix(windows.tokens.count))
            rows = rows.dropFirst(own.count)
            return labelled(text, windows, own)
        }
    }

    private func labelled(_ text: ReadText, _ windows: Windows, _ rows: [Rows]) -> Labelled {
        let joined = windows.joined(rows)
        let shares = (0..<joined.count).map { softmax(joined[$0]) }
        let labels = encoder.manifest.labels
        let best =
            transitions?.likeliest(shares.map { row in row.map { log(max($0, 1e-30)) } }) ?? shares.map(firstLargest)
        let tokens = zip(zip(text.offsets[text.inside], best), shares).map { token, share in
            Span(token.0, labels[token.1], score: share[token.1])
        }
        return Labelled(
            spans: transitions == nil ? groupedSpans(tokens) : bioesSpans(tokens), tokens: text.ids.count,
            windows: rows.count, isExact: windows.isExact)
    }

    /// Return the share of each label for texts that each fit into a pass, given as tokens; the likeliest label first.
    package func classify(
        _ texts: [[Int]], beforePass: () throws -> Void = {}
    ) throws -> [[(label: String, share: Double)]] {
        try demand(.texts)
        return try single(texts, beforePass).map { rows in
            let shares = zip(encoder.manifest.labels, softmax(rows[0])).map { (label: $0, share: $1) }
            return shares.enumerated().sorted { ($1.element.share, $0.offset) < ($0.element.share, $1.offset) }.map(
                \.element)
        }
    }

    /// Return the embeddings of texts that each fit into a pass, given as tokens, each of length 1.
    package func embed(_ texts: [[Int]], beforePass: () throws -> Void = {}) throws -> [[Float]] {
        try demand(.embeddings)
        return try single(texts, beforePass).map { rows in
            var row = Array(rows[0])
            if encoder.manifest.pooling == .mean {
                for t in 1..<max(1, rows.count) { for (place, value) in rows[t].enumerated() { row[place] += value } }
                row = row.map { $0 / Float(rows.count) }
            }
            let length = max(row.reduce(0) { $0 + $1 * $1 }.squareRoot(), 1e-12)
            return row.map { $0 / length }
        }
    }

    private func single(_ texts: [[Int]], _ beforePass: () throws -> Void) throws -> [Rows] {
        for text in texts where !(1...encoder.manifest.longest).contains(text.count) {
            throw ShardmillError(
                .promptTooLong, "the text has \(text.count) tokens: it may have 1 to \(encoder.manifest.longest)")
        }
        return try encoder.run(texts, beforePass: beforePass)
    }
}

/// Return the softmax of logits, computed in fp32 as in Python.
private func softmax(_ logits: ArraySlice<Float>) -> [Double] {
    let highest = logits.max() ?? 0
    let powers = logits.map { exp($0 - highest) }
    let total = powers.reduce(0, +)
    return powers.map { Double($0 / total) }
}
