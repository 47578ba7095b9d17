import Foundation

/// Return number `index` of a seed: SplitMix64.
func expectedNumber(_ seed: UInt64, _ index: Int) -> UInt64 {
    var z = seed &+ (UInt64(index) &+ 1) &* 0x9E37_79B9_7F4A_7C15
    z = (z ^ (z >> 30)) &* 0xBF58_476D_1CE4_E5B9
    z = (z ^ (z >> 27)) &* 0x94D0_49BB_1331_11EB
    return z ^ (z >> 31)
}

/// Return numbers of a seed between +-2^exponent, each exact in fp16: `count` rows of `channels`.
func expectedRows(_ seed: UInt64, exponent: Int, count: Int, channels: Int) -> [Float] {
    let step = Float(sign: .plus, exponent: exponent - 10, significand: 1)
    return (0..<count * channels).map { Float(2 * Int(expectedNumber(seed, $0) >> 54) - 1023) * step }
}

/// Return the weights of a group's experts for rows that take `taken` of them each, in turn: `count` rows of `experts`.
func expectedShares(count: Int, experts: Int, taken: Int) -> [Float] {
    var weights = [Float](repeating: 0, count: count * experts)
    for row in 0..<count {
        for number in 0..<taken {
            let weight = Float(sign: .plus, exponent: -2 - number, significand: Float(1 + row % 3))
            weights[row * experts + (row * taken + number) % experts] = weight
        }
    }
    return weights
}

/// What a build's programs must give for inputs that any machine can make; docs/model-json.md describes the file.
package struct Expected: Sendable {
    /// The entry of one part.
    struct Entry: Decodable {
        let seeds: [String: [Int]]?
        let limits: [String: Double]?
        let every, taken: Int?
        let why_not: String?
    }

    /// A token that comes second, and how far its logit is below the first one's.
    struct Rival: Decodable {
        let token: Int
        let gap: Double

        init(from decoder: any Decoder) throws {
            var list = try decoder.unkeyedContainer()
            token = try list.decode(Int.self)
            gap = try list.decode(Double.self)
        }
    }

    /// A prompt, and the tokens that must follow.
    struct Answer: Decodable {
        let prompt, tokens: [Int]
        let rivals: [Rival]
    }

    private struct About: Decodable {
        let format: Int
        let parts: [String: Entry]
        let answer: Answer?
    }

    /// Tokens of the sequence that a part is run on, and places of logits.
    static let (tokens, places) = (7, 256)

    let entries: [String: Entry]
    let answer: Answer?
    private let file: TensorFile

    /// Read the results that a build carries.
    ///
    /// - Throws: `ShardmillError` of kind `build` if the file is missing or damaged.
    package init(_ url: URL) throws {
        file = try TensorFile(url)
        let about: About
        do {
            about = try decoded(About.self, from: Data((file.metadata["about"] ?? "").utf8))
        } catch {
            throw file.refusal("it holds no expected results: \(describe(error))")
        }
        if about.format != 1 { throw file.refusal("its format is \(about.format); this version reads 1") }
        (entries, answer) = (about.parts, about.answer)
    }

    /// Return the recorded rows of a part, and for logits the places of the largest ones.
    func recorded(_ part: String) throws -> (rows: HostArray, largest: [[Int]]?) {
        let rows = try file.floats("\(part)/rows")
        if file.entries["\(part)/largest"] == nil { return (rows, nil) }
        return (rows, try file.integers("\(part)/largest"))
    }
}

/// What a check found of one part, or of the first answer.
public struct CheckedPart: Sendable {
    /// The part's name.
    public let name: String
    /// How far its results are from the recorded ones, by the way in which it was run.
    public let errors: [(way: String, error: Double)]
    /// How far they may be; nil if there is nothing to compare with.
    public let limit: Double?
    /// What else there is to say: why there is nothing, or which token differs.
    public let remark: String

    /// Whether no result is too far away.
    public var isRight: Bool { limit.map { limit in errors.allSatisfy { $0.error <= limit } } ?? true }
}

/// Passes that feed a sequence: first token, token after the last, and tokens when the pass is filled up.
private typealias Pass = (start: Int, stop: Int, width: Int)

extension Engine {
    /// Run every part by itself, and then the first answer, and compare with what the build expects.
    ///
    /// - Parameters:
    ///   - expected: the results that the build carries.
    ///   - precision: "fp16", as devices compute, or "fp32".
    ///   - note: called with each result; it may throw to stop.
    package func check(_ expected: Expected, precision: String = "fp16", note: (CheckedPart) throws -> Void) throws {
        for part in manifest.parts {
            guard let entry = expected.entries[part.name], let seeds = entry.seeds,
                let limit = entry.limits?[precision], let program = program(part.name)
            else {
                let why = expected.entries[part.name]?.why_not ?? "nothing was recorded of it"
                try note(CheckedPart(name: part.name, errors: [], limit: nil, remark: why))
                continue
            }
            var errors: [(String, Double)] = []
            for (way, passes, offset) in ways() {
                try reset()
                if part.kind == .layers && offset > 0 { try fit(manifest.context) }
                let rows = try run(program, seeds, entry.taken ?? 0, passes, offset)
                errors.append((way, try error(of: rows, part, expected, entry)))
            }
            try note(CheckedPart(name: part.name, errors: errors, limit: limit, remark: ""))
        }
        try renew()
        if let answer = expected.answer {
            let differs = try first(answer)
            let errors = [("tokens", differs.isEmpty || differs.hasPrefix("near tie") ? 0.0 : 1.0)]
            try note(CheckedPart(name: "first answer", errors: errors, limit: 0, remark: differs))
            try renew()
        }
    }

    /// Return the ways in which a part is run, by name, each with the distance from a position to its slot.
    private func ways() -> [(name: String, passes: [Pass], offset: Int)] {
        let count = min(Expected.tokens, manifest.context)
        var last: [Pass] = []
        var start = 0
        while start < count {  // no slot is left for a token that fills a pass up
            let taken = manifest.widths.last { $0 <= count - start } ?? count - start
            last.append((start, start + taken, taken))
            start += taken
        }
        let one = (0..<count).map { (start: $0, stop: $0 + 1, width: 1) }
        return [
            ("T=1", one, 0), ("T=\(manifest.widths.last ?? 1)", wide(count), 0),
            ("the last slots", last, manifest.context - count),
        ]
    }

    /// Return passes of the widest width; a narrower one is filled up to the next width, unless the program must do it.
    private func wide(_ count: Int) -> [Pass] {
        let widest = manifest.widths.last ?? 1
        return stride(from: 0, to: count, by: widest).map { start in
            let stop = min(start + widest, count)
            let next = manifest.widths.first { $0 >= stop - start && $0 <= manifest.lengths[0] - start }
            return (start, stop, manifest.recurrence?.narrow == nil ? next ?? stop - start : stop - start)
        }
    }

    /// Return a program's outputs for the rows of seeds, row after row, in the passes of one way.
    ///
    /// - Parameter taken: of a group of experts, how many of them each row takes.
    private func run(
        _ program: Program, _ seeds: [String: [Int]], _ taken: Int, _ passes: [Pass], _ offset: Int
    ) throws -> [[Float]] {
        let count = min(Expected.tokens, manifest.context)
        var given: [String: (channels: Int, rows: [Float])] = [:]
        for (name, seed) in seeds {
            guard case .fixed(let channels)? = program.part.inputs[name]?[1], seed.count == 2, seed[0] >= 0 else { continue }
            let rows = expectedRows(UInt64(seed[0]), exponent: seed[1], count: count, channels: channels)
            given[name] = (channels, rows)
        }
        if taken > 0, case .fixed(let experts)? = program.part.inputs["weights"]?[1] {
            given["weights"] = (experts, expectedShares(count: count, experts: experts, taken: taken))
        }
        var layout = KVLayout(manifest)
        layout.resize(self.layout.length)
        var found: [[Float]] = []
        for pass in passes {
            let positions = Array(pass.start..<pass.start + pass.width)
            let isLayers = program.part.kind == .layers
            var arrays = isLayers ? try layout.arrays(slots: positions.map { $0 + offset }, positions: positions) : [:]
            for (name, (channels, rows)) in given {
                var array = HostArray(zeros: [1, channels, pass.width, 1])
                for (t, position) in positions.enumerated() {
                    let row = min(position, pass.stop - 1) * channels
                    for c in 0..<channels { array.values[c * pass.width + t] = rows[row + c] }
                }
                arrays[name] = array
            }
            let output = try program.run(arrays, tokens: pass.width)
            for t in 0..<pass.stop - pass.start {
                found.append((0..<output.shape[1]).map { output.values[$0 * output.shape[2] + t] })
            }
        }
        return found
    }

    /// Return the largest relative error of a row; NaN if one is not a number.
    private func error(of rows: [[Float]], _ part: Part, _ expected: Expected, _ entry: Expected.Entry) throws -> Double {
        let (recorded, largest) = try expected.recorded(part.name)
        let columns = recorded.shape[1]
        var worst = 0.0
        for (t, row) in rows.enumerated() {
            var wanted = Array(recorded.values[t * columns..<(t + 1) * columns])
            var kept: [Float]
            if let largest, let seed = entry.seeds?["places"]?.first {
                let places = (0..<Expected.places).map { Int(expectedNumber(UInt64(seed), $0) % UInt64(row.count)) }
                kept = (places + largest[t]).map { row[$0] } + [row.max() ?? 0]
                wanted.append(wanted[Expected.places])
            } else {
                kept = stride(from: 0, to: row.count, by: entry.every ?? 1).map { row[$0] }
                kept = Array(kept.prefix(columns))
            }
            if kept.count != wanted.count {
                throw ShardmillError(.program, "\(part.name) gave \(kept.count) numbers, recorded were \(wanted.count)")
            }
            var (apart, length) = (0.0, 0.0)
            for (value, wanted) in zip(kept, wanted) {
                apart += (Double(value) - Double(wanted)) * (Double(value) - Double(wanted))
                length += Double(wanted) * Double(wanted)
            }
            let error = apart.squareRoot() / max(length.squareRoot(), 1e-30)
            worst = error.isNaN || worst.isNaN ? .nan : max(worst, error)
        }
        return worst
    }

    /// Continue a prompt; return what differs from the recorded answer.
    private func first(_ answer: Expected.Answer) throws -> String {
        let (fed, last) = (answer.prompt + answer.tokens, answer.prompt.count - 1)
        for pass in wide(last) {
            let positions = Array(pass.start..<pass.start + pass.width)
            try write(positions.map { fed[min($0, pass.stop - 1)] }, slots: positions, positions: positions)
        }
        for (number, (token, rival)) in zip(answer.tokens, answer.rivals).enumerated() {
            let logits = try forward([fed[last + number]], slots: [last + number], positions: [last + number])
            let found = try logits.argmax(0)
            if found == token { continue }
            let differs = "token \(number + 1) is \(found), not \(token)"
            return found == rival.token && rival.gap <= manifest.margin ? "near tie: \(differs)" : differs
        }
        return ""
    }
}
