#if canImport(ChatModel)
import Foundation
import Shardmill
import Testing

@testable import ChatModel
@testable import ShardmillDecode

/// The window's model with a store of its own and the toy.
@MainActor
private struct Screen {
    let model: ChatModel
    let build: ToyBuild
    let folder: URL

    init() throws {
        build = try finishedBuild()
        folder = FileManager.default.temporaryDirectory.appendingPathComponent("app-\(UUID().uuidString)")
        let store = ModelStore(folder: folder.appendingPathComponent("models"), cache: folder)
        model = ChatModel(store: store) { try ShardmillModel(at: $0, codec: Letters()) { _, _ in ToyBackend() } }
    }
}

@Test("the sample app copies a build, loads it, chats, and says how fast")
@MainActor
func sampleApp() async throws {
    let screen = try Screen()
    defer { try? FileManager.default.removeItem(at: screen.folder) }
    let model = screen.model
    model.openFirst()
    #expect(model.phase == .empty && model.work == nil)
    model.add(screen.build.folder)
    model.add(screen.build.folder)
    #expect(model.note.contains("is at work") || model.phase == .empty)
    await model.work?.value
    #expect(model.phase == .ready && model.name == "toy", "\(model.note)")
    model.send("AB")
    #expect(model.phase == .answering)
    await model.work?.value
    #expect(model.phase == .ready && model.lines.count == 2 && !model.lines[1].text.isEmpty && model.speed.contains("tokens/s"))
    model.clear()
    await model.work?.value
    #expect(model.lines.isEmpty && model.phase == .ready)
    model.check()
    await model.work?.value
    #expect(model.note.contains("no expected results") && model.phase == .ready)
    model.openFirst()
    await model.work?.value
    #expect(model.phase == .ready && model.speed.isEmpty)
}

@Test("the sample app goes to the background during its first start, and goes on when it comes back")
@MainActor
func hiddenStart() async throws {
    let screen = try Screen()
    defer { try? FileManager.default.removeItem(at: screen.folder) }
    let model = screen.model
    model.isInBackground(true)
    model.add(screen.build.folder)
    while model.phase != .loading("waiting until the app is in front", 0) { await Task.yield() }
    model.isInBackground(false)
    await model.work?.value
    #expect(model.phase == .ready, "\(model.note)")
}

@Test("what can't be opened is said with what helps, and leaves the window usable")
@MainActor
func refusedByTheApp() async throws {
    let screen = try Screen()
    defer { try? FileManager.default.removeItem(at: screen.folder) }
    screen.model.add(screen.folder.appendingPathComponent("nothing"))
    await screen.model.work?.value
    #expect(screen.model.phase == .empty && screen.model.note.contains("choose the folder of a finished build"))
    screen.model.add(screen.build.folder)
    await screen.model.work?.value
    #expect(screen.model.phase == .ready && screen.model.note.isEmpty)
}
#endif
