import Foundation
import Testing

@testable import ShardmillDecode

private struct Recorded: Decodable {
    struct Request: Decodable {
        let prompt: [Int]
        let fed: [[Int]]
        let calls: [Call]
    }

    /// A pass's slots and positions, what was forgotten, or a summary of a prefill.
    enum Call: Decodable {
        case pass([Int])
        case prefill([Int])
        case other

        private struct Prefill: Decodable { let prefill: [Int] }

        init(from decoder: Decoder) throws {
            if let pass = try? [[Int]](from: decoder), pass.count == 2 {
                self = .pass(pass[0])
            } else if let summary = try? Prefill(from: decoder) {
                self = .prefill(summary.prefill)
            } else {
                self = .other
            }
        }
    }

    let slots, verify: Int
    let widths: [Int]
    let policy: String
    let requests: [Request]
}

@Test("prompts are divided, reused and slid as in Python: the same slots in the same passes")
func sessions() throws {
    let cases = try vectors("sessions", Recorded.self)
    #expect(cases.count == 4)
    for one in cases {
        let build = try ToyBuild { $0 = ToyBuild.manifest(slots: one.slots, widths: one.widths, verify: one.verify) }
        let backend = ToyBackend()
        let engine = try Engine(try Manifest(folder: build.folder), backend: backend)
        let session = try Session(engine, contextPolicy: try #require(ContextPolicy(rawValue: one.policy)))
        for request in one.requests {
            let prefill = try session.prefill(request.prompt)
            for fed in request.fed {
                _ = try session.feed([Int](repeating: 5, count: fed[0]))
                session.commit(max(1, fed[0] - 1))
                #expect(session.room() == fed[1])
            }
            var slots: [[Int]] = []
            for case .pass(let pass) in request.calls { slots.append(pass) }
            #expect(backend.slots == slots)
            for case .prefill(let summary) in request.calls {
                #expect([prefill.held, prefill.reused, prefill.passes, prefill.width] == summary)
            }
            backend.slots = []
        }
    }
}

private func toy() throws -> Session {
    let build = try ToyBuild()
    return try Session(try Engine(try Manifest(folder: build.folder), backend: ToyBackend()))
}

private func text(_ session: Session, _ prompt: [Int], _ count: Int, _ drafter: (any Drafter)? = nil) throws -> [Int] {
    let generation = try Generation(session, prompt: prompt, options: Options(maxTokens: count), drafter: drafter)
    var found: [Int] = []
    while let token = try generation.next() { found.append(token.id) }
    return found
}

@Test("drafts change the number of passes, never the text")
func drafts() throws {
    let prompt = [1, 10, 9, 2, 17]
    let plain = try text(try toy(), prompt, 40)
    let drafted = try text(try toy(), prompt, 40, NgramDrafter())
    #expect(plain == drafted && plain.count == 40)
    let session = try toy()
    let generation = try Generation(session, prompt: prompt, options: Options(maxTokens: 40), drafter: SuffixDrafter())
    while try generation.next() != nil {}
    #expect(generation.accepted > 10 && generation.passes + generation.accepted == 39)
}

@Test("a generation that is stopped leaves a session that goes on exactly")
func stopped() throws {
    let session = try toy()
    let generation = try Generation(
        session, prompt: [1, 2, 3], options: Options(maxTokens: 30), drafter: SuffixDrafter())
    for _ in 0..<5 { _ = try generation.next() }
    generation.stop()
    #expect(try generation.next() == nil && generation.reason == .stop)
    #expect(try text(session, [1, 2, 3, 24], 20) == text(try toy(), [1, 2, 3, 24], 20))
}

@Test("the end of the text, the number of tokens and the context end a generation")
func reasons() throws {
    let prompt = [4]  // 4 -> 31, the end
    let ended = try Generation(try toy(), prompt: prompt, options: Options(maxTokens: 30))
    #expect(try ended.next() == Token(id: 31, fromDraft: false) && ended.reason == .eos)
    let short = try Generation(try toy(), prompt: [1], options: Options(maxTokens: 2))
    while try short.next() != nil {}
    #expect(short.reason == .length)
    let full = try Generation(try toy(), prompt: [Int](repeating: 1, count: 60), options: Options(maxTokens: 100))
    while try full.next() != nil {}
    #expect(full.reason == .context)
}

@Test("prompts that can't be fed are refused in one line")
func refusals() throws {
    let session = try toy()
    for (prompt, kind) in [
        ([], ShardmillError.Kind.request), ([99], .request), ([Int](repeating: 1, count: 65), .promptTooLong),
    ] {
        #expect { try session.check(prompt) } throws: { ($0 as? ShardmillError)?.kind == kind }
    }
}
