import Foundation
import Testing

@testable import ShardmillDecode

private struct Numbers: Decodable {
    let seed, index: String
    let places: [Int]
    let integers: [String]
    let numbers, waits: [Double]
}

@Test("random numbers are numpy's, bit for bit, at any place; their logarithms but for a rounding")
func generators() throws {
    for one in try vectors("generators", Numbers.self) {
        let random = Philox(
            seed: try #require(UInt64(one.seed)), stream: 2, index: try #require(UInt64(one.index)))
        #expect(one.integers.map { UInt64($0)! } == one.places.map { random.block($0 / 4)[$0 % 4] })
        #expect(one.numbers == one.places.map(random.number))
        for (number, expected) in zip(one.numbers, one.waits) {
            #expect(abs(wait(number) - expected) <= 2 * expected.ulp)
        }
    }
    #expect(wait(0) == 0x1p-54)
    #expect(wait(0x1p-53) == 0x1p-53)
}

private struct Drawn: Decodable {
    struct Settings: Decodable {
        let temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: Double?
        let top_k: Int?
        let seed: UInt64?
        let logit_bias: [String: Double]
    }

    let sampling: Settings
    let prompt: [Int]
    let rows: [[Float]]?
    let margin: Double?
    let tokens: [Int]

    var settings: Sampling {
        var found = Sampling()
        found.temperature = sampling.temperature ?? 0
        found.topP = sampling.top_p ?? 1
        found.minP = sampling.min_p ?? 0
        found.repetitionPenalty = sampling.repetition_penalty ?? 1
        found.presencePenalty = sampling.presence_penalty ?? 0
        found.frequencyPenalty = sampling.frequency_penalty ?? 0
        found.topK = sampling.top_k ?? 0
        found.seed = sampling.seed ?? 0
        found.logitBias = Dictionary(uniqueKeysWithValues: sampling.logit_bias.map { (Int($0)!, $1) })
        return found
    }
}

@Test("tokens are drawn as in Python, with every filter")
func draws() throws {
    let cases = try vectors("samplers", Drawn.self)
    #expect(cases.count == 22)
    for one in cases { try compare(one, try #require(one.rows).map { Logits(values: $0, tokens: 1) }) }
}

@Test("tokens of a large vocabulary are drawn as in Python, whether filters keep few or many")
func wide() throws {
    let cases = try vectors("wide", Drawn.self)
    #expect(cases.count == 14)
    // Row after row, and four rows of a pass whose columns lie one beside the other.
    let rows = (0..<8).map(wideRow)
    let passes = [rows[..<4], rows[4...]].map { rows in
        Logits(values: rows[rows.startIndex].indices.flatMap { v in rows.map { $0[v] } }, tokens: 4)
    }
    for one in cases {
        try compare(one, rows.map { Logits(values: $0, tokens: 1) })
        var sampler = Sampler(one.settings, prompt: one.prompt, vocab: rows[0].count)
        #expect(try (0..<8).map { try sampler.next(passes[$0 / 4], $0 % 4) } == one.tokens, "\(one.sampling)")
    }
}

private func compare(_ one: Drawn, _ logits: [Logits]) throws {
    var sampler = Sampler(one.settings, prompt: one.prompt, vocab: logits[0].vocab)
    let margin = try sampler.margin(logits[0], 0)
    let expected = one.margin ?? .infinity
    #expect(margin == expected || abs(margin - expected) <= 1e-9 * max(1, abs(margin)), "\(one.sampling)")
    #expect(try logits.map { try sampler.next($0, 0) } == one.tokens, "\(one.sampling)")
}

/// The made logits of write_vectors.py.
private func wideRow(_ place: Int) -> [Float] {
    (0..<151_936).map { v in
        let hashed = UInt32(truncatingIfNeeded: v &* 2_654_435_761 &+ place &* 40503 &+ 123_456_789)
        return Float(max(hashed, 1).leadingZeroBitCount) + Float(hashed % 8) / 8
    }
}

@Test("the likeliest token of a wide pass is found in its column, and the first of equals wins")
func columns() throws {
    let logits = Logits(values: [1, 9, 5, 9, 5, 0], tokens: 2)  // [V = 3, T = 2]
    #expect(try logits.argmax(0) == 1)
    #expect(try logits.argmax(1) == 0)
    #expect(try logits.row(1) == [9, 9, 0])
}

/// An output in any place, of fp32 or fp16.
private final class Placed: Buffer {
    let shape: [Int]
    private let steps: (channel: Int, token: Int)
    private let values: [Float]
    private let halves: [UInt16]?

    init(_ channels: Int, _ tokens: Int, _ steps: (channel: Int, token: Int), half: Bool, _ value: (Int, Int) -> Float)
    {
        shape = [1, channels, tokens, 1]
        self.steps = steps
        // What lies between the elements is never read.
        var memory = [Float](repeating: 999, count: channels * steps.channel + tokens * steps.token)
        for c in 0..<channels { for t in 0..<tokens { memory[c * steps.channel + t * steps.token] = value(c, t) } }
        values = memory
        halves = half ? memory.map { Half.bits($0) } : nil
    }

    func write(_ values: [Float]) {}

    func write(_ values: ArraySlice<Float>, at offset: Int) {}

    func read() -> [Float] { [] }

    func withColumns<Result>(_ body: (Columns) throws -> Result) throws -> Result {
        func columns(_ elements: Columns.Elements) -> Columns {
            Columns(elements, channels: shape[1], channelStep: steps.channel, tokenStep: steps.token)
        }
        if let halves { return try halves.withUnsafeBufferPointer { try body(columns(.half($0.baseAddress!))) } }
        return try values.withUnsafeBufferPointer { try body(columns(.single($0.baseAddress!))) }
    }
}

@Test("the likeliest token is found wherever an output lies, fp32 or fp16", arguments: [false, true])
func places(_ half: Bool) throws {
    let random = Philox(seed: 3, stream: 2, index: 0)
    var place = 0
    func next() -> UInt64 {
        place += 1
        return random.block(place / 4)[place % 4]
    }
    func number(_ kind: Int) -> Float {
        switch kind {  // many equal numbers; only negative ones; zeros of both signs; none above -infinity
        case 0: Float(next() % 7) - 3
        case 1: -Float(next() % 2000) - 1
        case 2: next() % 2 == 0 ? 0 : -0.0
        default: -.infinity
        }
    }
    for (channels, tokens, width) in [
        (1, 1, 1), (37, 1, 1), (5000, 1, 1), (5000, 1, 4), (4099, 4, 4), (700, 3, 4), (70, 3, 3),
    ] {
        for (channelStep, tokenStep) in [(width, 1), (width * 2, 2), (1, channels), (32, 1)] {
            for kind in 0..<4 {
                let rows = (0..<2).map { _ in (0..<channels).map { _ in (0..<tokens).map { _ in number(kind) } } }
                let parts = rows.map { rows in
                    Placed(channels, tokens, (channelStep, tokenStep), half: half) { rows[$0][$1] }
                }
                let logits = Logits(parts, tokens: tokens)
                for t in 0..<tokens {
                    let column = rows.joined().map { $0[t] }
                    let largest = try #require(column.max())
                    #expect(try logits.argmax(t) == column.firstIndex(of: largest))
                    #expect(try logits.row(t) == column)
                }
            }
        }
    }
}

@Test(
    "a setting out of its range is refused",
    arguments: zip(
        [
            \Sampling.temperature as WritableKeyPath<Sampling, Double> & Sendable, \.topP, \.minP, \.repetitionPenalty,
            \.presencePenalty, \.frequencyPenalty,
        ], [-1, -1, -1, -1, -1000.5, -1000.5]))
func refused(_ field: WritableKeyPath<Sampling, Double> & Sendable, _ below: Double) {
    for value in [below, .nan, .infinity] {
        var sampling = Sampling()
        sampling[keyPath: field] = value
        #expect(throws: ShardmillError.self) { try sampling.check(vocab: 10) }
    }
}
