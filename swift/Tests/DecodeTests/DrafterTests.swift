import Foundation
import Testing

@testable import ShardmillDecode

private struct Rounds: Decodable {
    struct Round: Decodable {
        let tokens: [Int]
        let confidence: [Double]
    }

    let drafter: String
    let text: [Int]
    let rounds: [Round]
}

@Test("drafters propose what Python's do, as a text grows")
func proposals() throws {
    for one in try vectors("drafts", Rounds.self) {
        let drafter: any Drafter = one.drafter == "ngram" ? NgramDrafter() : SuffixDrafter()
        try drafter.reset(Array(one.text[..<20]))
        for (place, round) in one.rounds.enumerated() {
            let draft = try drafter.propose(6)
            #expect(draft.tokens == round.tokens, "\(one.drafter), round \(place)")
            #expect(zip(draft.confidence, round.confidence).allSatisfy { abs($0 - $1) < 1e-12 })
            let start = 20 + 3 * place
            try drafter.observe(Array(one.text[start..<min(start + 3, one.text.count)]))
        }
    }
}

@Test("drafts that are always right are verified, and drafts that never are are given up, but for a probe")
func lengths() {
    var length = DraftLength()
    for _ in 0..<3 {
        length.timed(1, 1)
        length.timed(4, 1.4)
    }
    let draft = Draft(tokens: [1, 2, 3], confidence: [0.5, 0.5, 0.5])
    let width = { (count: Int) in count > 1 ? 4 : 1 }
    for _ in 0..<20 { length.observe(draft, accepted: 3) }
    #expect(length.choose(draft, width: width) == 3)
    for _ in 0..<400 { length.observe(draft, accepted: 0) }
    let chosen = (0..<64).map { _ in length.choose(draft, width: width) }
    #expect(chosen.filter { $0 > 0 }.count == 2)
}

@Test("a drafter that takes time is asked for as many tokens as pay, and one that takes none for all")
func limits() {
    func measured(_ draftSeconds: Double, accepted: Int) -> DraftLength {
        var length = DraftLength()
        for _ in 0..<3 {
            length.timed(1, 1)
            length.timed(8, 1.4)
            length.drafted(7, 7 * draftSeconds)
        }
        let draft = Draft(tokens: [Int](repeating: 1, count: 7), confidence: [Double](repeating: 0.5, count: 7))
        for _ in 0..<40 { length.observe(draft, accepted: accepted) }
        return length
    }
    func asked(_ draftSeconds: Double, accepted: Int, passes: Int = 1) -> [Int] {
        var length = measured(draftSeconds, accepted: accepted)
        return (0..<passes).map { _ in length.limit(7) { $0 > 1 ? 8 : 1 } }
    }
    #expect(asked(0.01, accepted: 0) == [7])
    #expect(asked(0.2, accepted: 7) == [7])
    #expect(asked(0.2, accepted: 2) == [2])
    #expect(asked(2, accepted: 7) == [0])
    #expect(asked(0.2, accepted: 0, passes: 64).filter { $0 > 0 } == [7, 7])  // probes
}
