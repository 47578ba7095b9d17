import Foundation

/// A piece of a text, in Unicode scalars, and its type. The score is the mean over its tokens.
public struct Span: Equatable, Sendable {
    /// Where the piece lies.
    public let range: Range<Int>
    /// What the piece is; the label of a single token.
    public let type: String
    /// The probability of the label.
    public let score: Double

    /// Make a span.
    package init(_ range: Range<Int>, _ type: String, score: Double) {
        self.range = range
        self.type = type
        self.score = score
    }
}

/// Return the spans of labelled tokens, as transformers' pipeline has them with the aggregation strategy "simple".
///
/// A token continues the span before it if its label has the same type and does not begin a span.
func groupedSpans(_ tokens: [Span]) -> [Span] {
    var found: [Span] = []
    var group: [Span] = []
    for token in tokens {
        let (begins, kind) = tag(token.type)
        if let last = group.last, begins || kind != tag(last.type).kind {
            found += merged(group)
            group = []
        }
        group.append(token)
    }
    return found + merged(group)
}

/// Return whether a label begins a span, and its type. Labels with neither B- nor I- are types themselves.
private func tag(_ label: String) -> (begins: Bool, kind: Substring) {
    label.hasPrefix("B-") || label.hasPrefix("I-") ? (label.hasPrefix("B-"), label.dropFirst(2)) : (false, label[...])
}

/// Return the span of tokens that belong together; none if they are outside of all spans.
private func merged(_ group: [Span]) -> [Span] {
    guard let first = group.first, let last = group.last else { return [] }
    let kind = first.type.firstIndex(of: "-").map { String(first.type[first.type.index(after: $0)...]) } ?? first.type
    if kind == "O" { return [] }
    let score = group.reduce(0) { $0 + $1.score } / Double(group.count)
    return [Span(first.range.lowerBound..<max(last.range.upperBound, first.range.lowerBound), kind, score: score)]
}

/// The scores that a checkpoint adds to steps from one label of the scheme BIOES to another.
struct Transitions {
    private static let impossible = -1e12
    private static let names: [String: String] = [
        "OO": "background_stay", "OB": "background_to_start", "OS": "background_to_start", "EO": "end_to_background",
        "SO": "end_to_background", "EB": "end_to_start", "ES": "end_to_start", "SB": "end_to_start",
        "SS": "end_to_start", "BI": "inside_to_continue", "II": "inside_to_continue", "BE": "inside_to_end",
        "IE": "inside_to_end",
    ]

    private let labels: [String]
    private let steps: [[Double]]

    private struct File: Decodable {
        struct Points: Decodable { let `default`: Point }

        struct Point: Decodable { let biases: [String: Double] }

        let operating_points: Points
    }

    /// Read a checkpoint's calibration.
    init(_ file: URL, labels: [String]) throws {
        let biases: [String: Double]
        do {
            biases = try decoded(File.self, from: Data(contentsOf: file)).operating_points.default.biases
        } catch {
            throw ShardmillError(.build, "\(file.path): no calibration of transitions: \(describe(error))")
        }
        self.init(biases, labels: labels)
    }

    init(_ biases: [String: Double], labels: [String]) {
        self.labels = labels
        steps = labels.map { before in
            labels.map { after in
                guard let name = Self.names["\(before.prefix(1))\(after.prefix(1))"] else { return Self.impossible }
                let within = after.hasPrefix("I") || after.hasPrefix("E")
                if within && before.dropFirst(2) != after.dropFirst(2) { return Self.impossible }
                return biases["transition_bias_" + name] ?? 0
            }
        }
    }

    /// Return the labels of the best path, by Viterbi's algorithm.
    ///
    /// - Parameter scores: for each token, the logarithms of the labels' probabilities.
    func likeliest(_ scores: [[Double]]) -> [Int] {
        guard let first = scores.first else { return [] }
        func allowed(_ label: Int, _ prefixes: String) -> Double {
            labels[label].first.map { prefixes.contains($0) } ?? false ? 0 : Self.impossible
        }
        var best = first.indices.map { first[$0] + allowed($0, "OBS") }
        var came: [[Int]] = []
        for row in scores.dropFirst() {
            var (next, from) = ([Double](), [Int]())
            for after in row.indices {
                let paths = best.indices.map { best[$0] + steps[$0][after] }
                let place = firstLargest(paths)
                from.append(place)
                next.append(paths[place] + row[after])
            }
            came.append(from)
            best = next
        }
        var path = [firstLargest(best.indices.map { best[$0] + allowed($0, "OES") })]
        for before in came.reversed() { path.append(before[path[path.count - 1]]) }
        return path.reversed()
    }
}

/// Return the spans of labelled tokens on a path through BIOES.
func bioesSpans(_ tokens: [Span]) -> [Span] {
    var found: [Span] = []
    var group: [Span] = []
    for token in tokens {
        group.append(token)
        if let last = token.type.first, "OES".contains(last) {
            found += merged(group)
            group = []
        }
    }
    return found
}

/// Return the place of the largest number, of equals the first.
func firstLargest(_ values: some Collection<Double>) -> Int {
    var (best, place) = (-Double.infinity, 0)
    for (next, value) in values.enumerated() where value > best { (best, place) = (value, next) }
    return place
}
