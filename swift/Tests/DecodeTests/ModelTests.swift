import Foundation
import Shardmill
import ShardmillText
import Testing

@testable import ShardmillDecode

/// Return the error of some work, which has to be typed; nil if all went well.
private func refusal(_ work: () async throws -> Void) async throws -> ShardmillError? {
    do { try await work() } catch let error as ShardmillError { return error }
    return nil
}

@Test("what an app asks for and can't have is an error that says so, and the model goes on")
func refusedRequests() async throws {
    let build = try ToyBuild()
    let model = try ShardmillModel(at: build.folder, codec: Letters()) { _, _ in ToyBackend() }
    func complete(_ text: String = "A", _ change: (inout ShardmillOptions) -> Void = { _ in }) async throws -> String {
        var options = ShardmillOptions(maxTokens: 5)
        change(&options)
        var found = ""
        for try await piece in model.complete(text, options: options) { found += piece }
        return found
    }
    let whole = try await complete()
    #expect(whole.count == 5)
    let refused: [(kind: ShardmillError.Kind, named: String, change: (inout ShardmillOptions) -> Void)] = [
        (.request, "no head is loaded", { $0.drafter = .head }),
        (.request, "takes no adapters", { $0.adapter = "one" }),
        (.request, "stop string", { $0.stop = [""] }), (.request, "maxTokens is 0", { $0.maxTokens = 0 }),
        (.request, "temperature", { $0.sampling.temperature = -1 }),
    ]
    for (kind, named, change) in refused {
        let error = try await refusal { _ = try await complete("A", change) }
        #expect(error?.kind == kind && error?.message.contains(named) == true, "\(named)")
    }
    let long = try await refusal { _ = try await complete(String(repeating: "A", count: 65)) }
    #expect(long?.kind == .promptTooLong)
    let chat = try await refusal { _ = try await model.chat().respond(to: "A") }
    #expect(chat?.kind == .request && chat?.message.contains("has no chat format") == true)
    model.pause()
    #expect(try await refusal { _ = try await complete() }?.kind == .interrupted)
    model.resume()
    await model.unload()
    #expect(try await complete() == whole)
}

@Test("a message that comes during an answer waits, and both turns are kept")
func messagesAtOnce() async throws {
    let build = try ToyBuild { $0["chat"] = chat(system: false, strip: false) }
    let talk = try ShardmillModel(at: build.folder, codec: Letters()) { _, _ in ToyBackend() }.chat()
    async let one = talk.respond(to: "A", options: ShardmillOptions(maxTokens: 2))
    async let other = talk.respond(to: "B", options: ShardmillOptions(maxTokens: 2))
    let answers = try await [one, other]
    let messages = await talk.messages
    #expect(messages.map(\.role) == [.user, .assistant, .user, .assistant])
    #expect(Set(messages.map(\.content)) == Set(["A", "B"] + answers))
}

@Test("messages are answered in the order in which their streams were made, and one that is cancelled leaves the line")
func messagesInLine() async throws {
    let build = try ToyBuild { $0["chat"] = chat(system: false, strip: false) }
    for _ in 0..<5 {
        let talk = try ShardmillModel(at: build.folder, codec: Letters()) { _, _ in ToyBackend() }.chat()
        let streams = "ABC".map { talk.stream(String($0), options: ShardmillOptions(maxTokens: 1)) }
        try await withThrowingTaskGroup(of: Void.self) { group in
            for (place, stream) in streams.enumerated().reversed() {
                group.addTask {
                    let reader = Task { for try await _ in stream {} }
                    if place == 1 { reader.cancel() }
                    do { try await reader.value } catch is CancellationError {}
                }
            }
            try await group.waitForAll()
        }
        let asked = await talk.messages.filter { $0.role == .user }.map(\.content)
        #expect(asked == ["A", "C"] || asked == ["A", "B", "C"])
    }
}

@Test("a stream whose reader is cancelled does not look finished")
func cancelledStreams() async throws {
    let build = try ToyBuild()
    let model = try ShardmillModel(at: build.folder, codec: Letters()) { _, _ in ToyBackend() }
    for _ in 0..<40 {
        let reader = Task {
            for try await _ in model.complete("A", options: ShardmillOptions(maxTokens: 50)) {
                withUnsafeCurrentTask { $0?.cancel() }
            }
        }
        await #expect(throws: CancellationError.self) { try await reader.value }
    }
}

/// A back end that others can ask.
private final class Watched: @unchecked Sendable {
    let backend = ToyBackend()
}

@Test("conversations keep their caches beside each other, as many as the app says, and programs are loaded once")
func conversationsAtOnce() async throws {
    let build = try ToyBuild { $0["chat"] = chat(system: false, strip: false) }
    for (most, kept) in [(2, true), (1, false)] {
        let watched = Watched()
        let model = try ShardmillModel(at: build.folder, codec: Letters(), conversations: most) { _, _ in
            watched.backend
        }
        let options = ShardmillOptions(maxTokens: 2)
        var (one, other): (Chat?, Chat?) = (model.chat(), model.chat())
        for turn in 0..<2 {
            for (talk, question) in [(one, "AB"), (other, "CD")] {
                _ = try await talk?.respond(to: question, options: options)
                let last = try #require(await talk?.last)
                #expect(turn == 0 || (last.promptTokensReused >= 13) == kept, "\(last)")
            }
        }
        #expect(watched.backend.states == most && watched.backend.functions.count == 2)
        (one, other) = (nil, nil)
        for _ in 0..<3 { _ = try await model.chat().respond(to: "C", options: options) }
        #expect(watched.backend.states == most)
    }
}

@Test("a conversation goes on from what the app has kept, and is cleared but for its instructions")
func history() async throws {
    let build = try ToyBuild {
        $0 = ToyBuild.manifest(slots: 128)
        $0["chat"] = chat(system: true, strip: false)
    }
    func open() throws -> ShardmillModel {
        try ShardmillModel(at: build.folder, codec: Letters()) { _, _ in ToyBackend() }
    }
    let options = ShardmillOptions(maxTokens: 2)
    let whole = try open().chat(instructions: "Z")
    #expect(try await whole.tokenCount() == 0)
    let first = try await whole.respond(to: "A", options: options)
    let (count, more) = (try await whole.tokenCount(), try await whole.tokenCount(adding: "B"))
    let stored = try JSONEncoder().encode(await whole.messages)
    let second = try await whole.respond(to: "B", options: options)
    #expect(await whole.last?.promptTokens == more && more > count && count > 0)
    let kept = try JSONDecoder().decode([Message].self, from: stored)
    #expect(kept == [Message(.system, "Z"), Message(.user, "A"), Message(.assistant, first)])
    let again = try open().chat(history: kept)
    #expect(try await again.respond(to: "B", options: options) == second)
    #expect(await again.messages == whole.messages && again.isResponding == false)
    #expect(await again.messages.map(\.id).first == kept.first?.id)
    try await again.clear()
    #expect(await again.messages == [Message(.system, "Z")])
    #expect(try await again.respond(to: "A", options: options) == first)
}

@Test("a conversation that is longer than the context ends with an error that says so, or slides")
func longConversations() async throws {
    let build = try ToyBuild { $0["chat"] = chat(system: false, strip: false) }
    func turns(_ context: ContextPolicy) async throws -> (Int, ShardmillError?) {
        let talk = try ShardmillModel(at: build.folder, codec: Letters(), context: context) { _, _ in ToyBackend() }.chat()
        for turn in 0..<12 {
            let error = try await refusal {
                _ = try await talk.respond(to: "A", options: ShardmillOptions(maxTokens: 3))
            }
            if let error { return (turn, error) }
        }
        return (12, nil)
    }
    let (ended, error) = try await turns(.stop)
    #expect((1..<12).contains(ended) && error?.kind == .promptTooLong)
    let (slid, none) = try await turns(.slide)
    #expect(slid == 12 && none == nil)
}

@Test("a thought is no part of the answer, nor of later turns")
func thoughts() async throws {
    // The toy goes on after ">" with the letters of tokens that follow by its rule; the marks are among them.
    let build = try ToyBuild { $0["chat"] = chat(system: false, strip: false) }
    let plain = try ShardmillModel(at: build.folder, codec: Letters()) { _, _ in ToyBackend() }
    let options = ShardmillOptions(maxTokens: 6)
    let said = try await plain.chat().respond(to: "A", options: options)
    let letters = said.map(String.init)
    try #require(letters.count == 6)
    let thinking = try ToyBuild {
        $0["chat"] = nil
        var format = chat(system: false, strip: false)
        format["thoughts"] = ["begin": letters[0], "end": letters[3]]
        $0["conversation"] = format
    }
    let talk = try ShardmillModel(at: thinking.folder, codec: Letters()) { _, _ in ToyBackend() }.chat()
    var pieces: [AnswerPiece] = []
    for try await piece in talk.pieces("A", options: options) { pieces.append(piece) }
    let (thought, answer) = (letters[1] + letters[2], letters[4] + letters[5])
    #expect(await talk.messages == [Message(.user, "A"), Message(.assistant, answer, thought: thought)])
    #expect(pieces.contains(.thought(letters[1])) && pieces.last == .text(letters[5]))
    try await talk.clear()
    #expect(try await talk.respond(to: "A", options: options) == answer)
}

@Test("an answer's calls are values of its message, and a question's are not")
func callsOfMessages() {
    let text = #"Wait. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>"#
    #expect(Message(.assistant, text).calls.map(\.arguments) == [#"{"a": 1}"#])
    #expect(Message(.user, text).calls.isEmpty && Message(.assistant, "f(a=1)").calls.isEmpty)
}

@Test("a function is not loaded if the one before it took more memory than is left, and is where there is memory again")
func memoryOfFunctions() throws {
    let build = try ToyBuild()
    let part = try Manifest(folder: build.folder).parts[0]
    var left = [500, 300, 150, 400, 300].map { $0 << 20 }  // before and after each load
    let backend = ToyBackend()
    let shared = Shared(backend) { left.removeFirst() }
    _ = try shared.load(part, function: "wide")
    #expect("200 MiB, 150 left") { try shared.load(part, function: "narrow") } throws: { error in
        let error = error as? ShardmillError
        return error?.kind == .memory && error?.message.contains("took 200 MiB") == true
            && error?.message.contains("leaves the app 150") == true
    }
    _ = try shared.load(part, function: "narrow")
    _ = try shared.load(part, function: "wide")  // is loaded
    #expect(backend.functions == ["wide", "narrow"] && left.isEmpty)
    let free = Shared(ToyBackend()) { nil }
    for name in ["wide", "narrow"] { _ = try free.load(part, function: name) }
}

@Test("what an alert shows is the error's own line")
func alerts() {
    let error: any Error = ShardmillError(.request, "shorten it")
    #expect(error.localizedDescription == "shorten it")
}
