import CoreML
import Foundation
import ShardmillDecode

/// The compiled bundles that this system may load: the build's own, or its packages compiled again into a cache.
///
/// Core ML specialises a bundle for one version of the system, and may refuse a bundle of another version, or of
/// another compiler. So only bundles that Apple's compiler made on this version are loaded as they are.
package struct Compiler: Sendable {
    /// Where compiled bundles are kept, a folder for each version of the system. It must be a stable path: the system
    /// keys what it specialises by the bundle's path.
    package let cache: URL

    /// Use a cache; Application Support if left out.
    package init(cache: URL? = nil) {
        let home = FileManager.default.urls(for: .applicationSupportDirectory, in: .userDomainMask).first
        self.cache =
            cache ?? (home ?? FileManager.default.temporaryDirectory).appendingPathComponent("Shardmill/compiled")
    }

    /// Return the bundle to load for each part that needs another one than the build's.
    ///
    /// What earlier versions of the system left in the cache is removed.
    ///
    /// - Parameters:
    ///   - manifest: the build's model.json.
    ///   - progress: called before a part is compiled, which takes seconds to minutes; it may throw to stop.
    /// - Throws: `ShardmillError` if a package is missing or can't be compiled.
    package func bundles(
        _ manifest: Manifest, progress: @Sendable (Part, Int) throws -> Void = { _, _ in }
    ) async throws -> [String: URL] {
        try await bundles(manifest.allParts, packages: manifest.packages, manifest.folder, progress: progress)
    }

    /// Do the same for an encoder's build.
    package func bundles(_ manifest: EncoderManifest) async throws -> [String: URL] {
        try await bundles(manifest.parts, packages: manifest.packages, manifest.folder) { _, _ in
            try Task.checkCancellation()
        }
    }

    /// Remove what was compiled of the build in a folder, for each version of the system.
    package func remove(_ build: URL) {
        for system in (try? FileManager.default.contentsOfDirectory(at: cache, includingPropertiesForKeys: nil)) ?? [] {
            try? FileManager.default.removeItem(at: system.appendingPathComponent(name(build)))
        }
    }

    /// Return the name of a build's folder in the cache: by its own last two names, as an update of an app moves the rest.
    private func name(_ build: URL) -> String {
        fingerprint(build.standardizedFileURL.pathComponents.suffix(2).joined(separator: "/"))
    }

    private func bundles(
        _ parts: [Part], packages: [String: URL], _ build: URL, progress: @Sendable (Part, Int) throws -> Void
    ) async throws -> [String: URL] {
        remove(from: cache, but: [System.build])
        let own = ours.appendingPathComponent(name(build))
        var found: [String: URL] = [:]
        for (place, part) in parts.enumerated() where !isOurs(part) {
            guard let package = packages[part.name], isFolder(package) else {
                if FileManager.default.fileExists(atPath: part.program.path) { continue }  // loaded as it is
                throw ShardmillError(
                    .build, "\(part.program.path) is missing, and so is its package; copy the build again")
            }
            let bundle = own.appendingPathComponent(try stamp(package)).appendingPathComponent("\(part.name).mlmodelc")
            if !isFolder(bundle) {
                try progress(part, place)
                try await compile(package, to: bundle)
            }
            found[part.name] = bundle
        }
        remove(from: own, but: Set(found.values.map { $0.deletingLastPathComponent().lastPathComponent }))
        return found
    }

    /// Return whether this version of the system has run the bundles before, as far as the package knows.
    ///
    /// No call of Core ML tells what is specialised; the system may have dropped it for lack of space.
    package func isWarm(_ manifest: Manifest, bundles: [String: URL], units: String) -> Bool {
        (try? mark(manifest, bundles, units)).map { FileManager.default.fileExists(atPath: $0.path) } ?? false
    }

    /// Note that this version of the system has run the bundles.
    package func setWarm(_ manifest: Manifest, bundles: [String: URL], units: String) throws {
        let file = try mark(manifest, bundles, units)
        try FileManager.default.createDirectory(at: file.deletingLastPathComponent(), withIntermediateDirectories: true)
        try Data().write(to: file)
    }

    private var ours: URL { cache.appendingPathComponent(System.build) }

    /// Return the file that says that bundles at these paths are warm. The system's own cache goes by the path too.
    private func mark(_ manifest: Manifest, _ bundles: [String: URL], _ units: String) throws -> URL {
        let keys = try manifest.allParts.map { part in
            let bundle = bundles[part.name] ?? part.program
            return "\(bundle.standardizedFileURL.path) \(try stamp(bundle))"
        }
        let own = ours.appendingPathComponent(name(manifest.folder))
        return own.appendingPathComponent("warm-\(fingerprint(units + "\n" + keys.joined(separator: "\n")))")
    }

    /// Return whether Apple's compiler made a part's bundle on this version of the system.
    private func isOurs(_ part: Part) -> Bool {
        isFolder(part.program) && part.compiler["name"] == "coreml" && part.compiler["build"] == System.build
    }

    /// Return a name for a folder's content by its files' names, sizes and dates. Its place is left out: an update of
    /// an app moves the app's folder.
    private func stamp(_ folder: URL) throws -> String {
        var lines: [String] = [folder.lastPathComponent]
        let files = FileManager.default.enumerator(atPath: folder.path)
        while let name = files?.nextObject() as? String {
            let status = try FileManager.default.attributesOfItem(atPath: folder.appendingPathComponent(name).path)
            let date = (status[.modificationDate] as? Date)?.timeIntervalSince1970 ?? 0
            if status[.type] as? FileAttributeType != .typeDirectory {
                lines.append("\(name) \(status[.size] ?? 0) \(date)")
            }
        }
        return fingerprint(lines.sorted().joined(separator: "\n"))
    }

    /// Remove what other versions, of the system or of a build, left in a folder.
    private func remove(from folder: URL, but kept: Set<String>) {
        let found = (try? FileManager.default.contentsOfDirectory(at: folder, includingPropertiesForKeys: nil)) ?? []
        for url in found where !kept.contains(url.lastPathComponent) && !url.lastPathComponent.hasPrefix("warm-") {
            try? FileManager.default.removeItem(at: url)
        }
    }

    private func compile(_ package: URL, to bundle: URL) async throws {
        do {
            let made = try await MLModel.compileModel(at: package)  // in a temporary folder, which may go at any time
            defer { try? FileManager.default.removeItem(at: made) }  // unless it was moved
            try FileManager.default.createDirectory(
                at: bundle.deletingLastPathComponent(), withIntermediateDirectories: true)
            try excludeFromBackup(cache)
            if isFolder(bundle) { return }  // another process was faster
            try FileManager.default.moveItem(at: made, to: bundle)
        } catch {
            throw ShardmillError(
                .program, "\(package.lastPathComponent) can't be compiled: \(error.localizedDescription)")
        }
    }
}

private func isFolder(_ url: URL) -> Bool {
    var folder: ObjCBool = false
    return FileManager.default.fileExists(atPath: url.path, isDirectory: &folder) && folder.boolValue
}

/// Keep a folder that can be made again out of backups, on Apple's systems.
package func excludeFromBackup(_ folder: URL) throws {
    #if canImport(Darwin)
    var (url, values) = (folder, URLResourceValues())
    values.isExcludedFromBackup = true
    try url.setResourceValues(values)
    #endif
}

/// Return a name for a text: FNV-1a, 64 bits, which is enough to tell some packages apart.
private func fingerprint(_ text: String) -> String {
    let hash = text.utf8.reduce(UInt64(0xCBF2_9CE4_8422_2325)) { ($0 ^ UInt64($1)) &* 0x100_0000_01B3 }
    return String(hash, radix: 16)
}

/// The system's version, as bundles name it.
package enum System {
    /// The build of the system, for example 24F74.
    package static var build: String {
        #if canImport(Darwin)
        // `operatingSystemVersionString` has the build too, but in the language of the user.
        var text = [CChar](repeating: 0, count: 64)
        var size = text.count
        if sysctlbyname("kern.osversion", &text, &size, nil, 0) == 0 {
            return String(decoding: text.prefix { $0 != 0 }.map { UInt8(bitPattern: $0) }, as: UTF8.self)
        }
        #endif
        return ProcessInfo.processInfo.operatingSystemVersionString.filter { $0 != "/" }
    }
}
