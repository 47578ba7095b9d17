import Foundation
import Shardmill
import ShardmillText
import Testing

@testable import ShardmillDecode

/// A token for each letter.
private struct Letters: TextCodec {
    func encode(_ text: String, addSpecialTokens: Bool) throws -> [Int] { text.utf8.map { Int($0) % ToyBuild.vocab } }

    func decode(_ tokens: [Int], skipSpecialTokens: Bool) -> String {
        String(decoding: tokens.map { UInt8(65 + $0) }, as: UTF8.self)
    }
}

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

@Test("what an alert shows is the error's own line")
func alerts() {
    let error: any Error = ShardmillError(.request, "shorten it")
    #expect(error.localizedDescription == "shorten it")
}
