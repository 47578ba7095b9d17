import Foundation

/// An encoder in memory: tokens in, a row for each token out.
///
/// A program takes as many tokens as its bucket has. A bucket may have a chain of programs. Texts fill the first tokens, one after the other; no token sees a
/// token of another text, or of the rest. So neither the bucket nor its other texts change the rows of a text.
package final class Encoder {
    /// The build's model.json.
    package let manifest: EncoderManifest
    private let embedding: Table
    private let positions: Table?
    private let types: Table?
    private var chains: [(bucket: Int, programs: [Program])] = []
    private let channels: Int

    /// Load every program.
    ///
    /// - Parameters:
    ///   - manifest: the build's model.json.
    ///   - backend: what runs the programs.
    ///   - progress: called before each part is loaded, with its place.
    package init(
        _ manifest: EncoderManifest, backend: any Backend, progress: (Part, Int) throws -> Void = { _, _ in }
    ) throws {
        self.manifest = manifest
        embedding = try Table(manifest.embedding)
        positions =
            try Table.contains("positions", manifest.embedding) ? Table(manifest.embedding, name: "positions") : nil
        types = try Table.contains("types", manifest.embedding) ? Table(manifest.embedding, name: "types") : nil
        channels = embedding.columns
        for table in [positions, types].compactMap({ $0 }) where table.columns != channels {
            throw ShardmillError(.build, "\(manifest.embedding.path): the tables have other numbers of columns")
        }
        let fits = manifest.parts.allSatisfy { $0.inputs["x"]?[1] == .fixed(channels) }
        if embedding.rows < manifest.vocab || !fits || (positions.map { $0.rows < manifest.longest } ?? false) {
            throw ShardmillError(.build, "\(manifest.embedding.path): the tables do not fit the programs")
        }
        for (place, part) in manifest.parts.enumerated() {
            try progress(part, place)
            if place % manifest.chain == 0 { chains.append((manifest.bucket(of: place), [])) }
            chains[chains.count - 1].programs.append(try Program(part, backend: backend))
        }
        chains.sort { $0.bucket < $1.bucket }
    }

    /// Return the rows of texts that each fit into a pass: for each text [n, R], row after row. Short texts share
    /// passes.
    ///
    /// - Parameters:
    ///   - texts: the tokens of each text.
    ///   - beforePass: called before every pass; it may throw to stop.
    package func run(_ texts: [[Int]], beforePass: () throws -> Void = {}) throws -> [Rows] {
        var found = [Rows](repeating: Rows(columns: 0, values: []), count: texts.count)
        for together in packedTexts(texts.map(\.count), longest: manifest.longest) {
            try beforePass()
            for (place, rows) in zip(together, try runTogether(together.map { texts[$0] })) { found[place] = rows }
        }
        return found
    }

    /// Return the rows of texts that share a pass of the smallest bucket that takes them.
    private func runTogether(_ texts: [[Int]]) throws -> [Rows] {
        let counts = texts.map(\.count)
        let total = counts.reduce(0, +)
        guard let (bucket, programs) = chains.first(where: { $0.bucket >= total }) else {
            throw ShardmillError(.request, "\(total) tokens: the largest program takes \(manifest.longest)")
        }
        var given = encoderArrays(manifest, bucket: bucket, counts: counts)
        var output = try columns(texts, bucket)
        given["embedded"] = output
        for program in programs {
            given["x"] = output
            output = try program.run(given, tokens: bucket)
        }
        let rows = manifest.labels.isEmpty ? output.shape[1] : manifest.labels.count
        if output.shape[1] < rows || output.shape[2] < total {
            throw ShardmillError(.program, "an output has the shape \(output.shape)")
        }
        var first = 0
        return try counts.map { count in
            defer { first += count }
            var values: [Float] = []
            values.reserveCapacity(count * rows)
            for t in first..<first + count {
                for r in 0..<rows { values.append(output.values[r * output.shape[2] + t]) }
            }
            guard values.allSatisfy(\.isFinite) else {  // of NaN, the likeliest label would be the first
                throw ShardmillError(
                    .program, "the model has computed a number that is not finite, so the text has no answer")
            }
            return Rows(columns: rows, values: values)
        }
    }

    /// Return x [1, d, T, 1]: for each token the sum of its rows in the tables.
    private func columns(_ texts: [[Int]], _ bucket: Int) throws -> HostArray {
        var x = HostArray(zeros: [1, channels, bucket, 1])
        var first = 0
        for text in texts {
            var sum = try embedding.columns(of: text)
            if let positions { sum.add(try positions.columns(of: Array(text.indices))) }
            if let types { sum.add(try types.columns(of: text.map { _ in 0 })) }
            for c in 0..<channels {
                for t in text.indices { x.values[c * bucket + first + t] = sum.values[c * text.count + t] }
            }
            first += text.count
        }
        return x
    }
}

/// Rows of numbers, [n, columns].
package struct Rows: Equatable, Sendable {
    /// The numbers of a row.
    package let columns: Int
    /// All numbers, row after row.
    package let values: [Float]

    /// The number of rows.
    package var count: Int { columns == 0 ? 0 : values.count / columns }

    /// Return one row.
    package subscript(row: Int) -> ArraySlice<Float> { values[row * columns..<(row + 1) * columns] }
}

extension HostArray {
    fileprivate mutating func add(_ other: HostArray) {
        for place in values.indices { values[place] += other.values[place] }
    }
}

/// Return which texts share a pass, by their places: each text goes into the first pass that has room, the longest
/// first.
func packedTexts(_ counts: [Int], longest: Int) -> [[Int]] {
    var passes: [[Int]] = []
    var room: [Int] = []
    for place in counts.indices.sorted(by: { (counts[$1], $0) < (counts[$0], $1) }) {
        let pass = room.firstIndex { $0 >= counts[place] } ?? room.count
        if pass == room.count {
            passes.append([])
            room.append(longest)
        }
        passes[pass].append(place)
        room[pass] -= counts[place]
    }
    return passes
}

/// Return the arrays of a pass by the names of inputs, all but x.
///
/// - Parameters:
///   - manifest: the build's model.json.
///   - bucket: T.
///   - counts: the tokens of each text, one text after the other.
func encoderArrays(_ manifest: EncoderManifest, bucket: Int, counts: [Int]) -> [String: HostArray] {
    let total = counts.reduce(0, +)
    let positions = counts.flatMap { Array(0..<$0) } + Array(0..<bucket - total)
    let owners =
        counts.enumerated().flatMap { [Int](repeating: $0, count: $1) } + [Int](repeating: -1, count: bucket - total)
    var found = ["attn_mask": encoderMask(owners, band: nil)]
    if let band = manifest.band { found["attn_mask_sliding"] = encoderMask(owners, band: band) }
    for (name, numbers) in manifest.rope {
        let table = ropeTable(numbers, positions: bucket)
        let half = numbers.inv_freq.count
        for (input, rows) in [("rope_cos", table.cos), ("rope_sin", table.sin)] {
            found[input + (name == "rope" ? "" : "_local")] = HostArray(
                shape: [bucket, half], values: positions.flatMap { rows[$0 * half..<($0 + 1) * half] })
        }
    }
    return found
}

/// Return [1, 1, T, T]: 0 where row and column are of one text and at most `band` apart, otherwise -1e4.
private func encoderMask(_ owners: [Int], band: Int?) -> HostArray {
    let count = owners.count
    var mask = HostArray(zeros: [1, 1, count, count])
    for t in 0..<count {
        for s in 0..<count where owners[s] != owners[t] || abs(t - s) > band ?? count {
            mask.values[t * count + s] = masked
        }
    }
    return mask
}
